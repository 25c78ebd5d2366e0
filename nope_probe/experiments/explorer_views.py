"""From captured maps of all combinations to an explorer and the arrays that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.pattern_changes import KeptPattern, kept_patterns
from nope_probe.analyses.shapley import Condition, PlayerSet
from nope_probe.components import LETTERS, Letter
from nope_probe.figures.explorer import MEASURES, Explorer, SwitchedMaps, strongest_source
from nope_probe.maps.centred import row_centred
from nope_probe.maps.downsample import Pooled, pool
from nope_probe.maps.folds import pooled
from nope_probe.maps.maps import ScoreMaps, StageMaps
from nope_probe.maps.stored_maps import StoredLayer, StoredMaps

PAGE_BYTES = 900_000  # beside all other maps of a report
MAX_POSITIONS = 64  # of a map in the explorer, however long the sequences are
HEADS = "mean over heads"
Folds = Float[Tensor, "fold layer panel row key_pos"]
Mean = Float[Tensor, "layer panel row key_pos"]
# The folds that panels are measured from, the panels as they are shown, and what they are of.
Measured = tuple[Folds, Mean, ScoreMaps | StageMaps]


def combinations(players: PlayerSet) -> list[Condition]:
    """Return the condition of each combination: bit k of its place says that player k is removed.

    Example:
        >>> from nope_probe.analyses.shapley import player_set
        >>> [sorted(gone) for gone in combinations(player_set(["mask", "rope"]))]
        [[], ['mask'], ['rope'], ['mask', 'rope']]
    """
    return [
        players.condition(
            [player for bit, player in enumerate(players.players) if not number >> bit & 1]
        )
        for number in range(2 ** len(players.players))
    ]


def components_of(players: PlayerSet) -> dict[str, list[str]]:
    """Return the components of each player, by its name, as `Explorer.players` holds them."""
    return {player.name: sorted(player.components) for player in players.players}


def _arrays(
    combinations: Iterable[Measured],
    skip_keys: int,
    max_positions: int,
) -> dict[str, Any]:
    """Return `maps`, `measures` and `block` of all combinations, as `SwitchedMaps` holds them.

    Args:
        combinations: of each combination, the intact model first. No folds are held but the intact
            model's.
        skip_keys: how many first keys the measures leave out.
        max_positions: larger maps are pooled to this many positions.
    """
    intact: Folds | None = None
    maps, measures, block = [], [], 1
    for folds, shown, source in combinations:
        intact, queries = folds if intact is None else intact, source.query_positions
        both = folds.flatten(1, 2), intact.flatten(1, 2)
        kept = kept_patterns(*both, skip_keys, source.counts, queries)
        cells = shown.flatten(0, 1).cpu().double().numpy()
        small = pool(cells, max_positions, queries.numpy())
        maps.append(small.values.reshape(*shown.shape[:2], *small.values.shape[1:]))
        measures.append(_intervals(kept).reshape(*shown.shape[:2], 3, 3))
        block = small.block
    return {"maps": np.stack(maps), "measures": np.stack(measures), "block": block}


def _intervals(kept: Sequence[KeptPattern]) -> Float[np.ndarray, "panel 3 3"]:
    intervals = [[getattr(pattern, name) for name in MEASURES] for pattern in kept]
    return np.array([[[i.value, i.low, i.high] for i in row] for row in intervals])


def pattern_view(
    maps: Iterable[ScoreMaps],
    layers: Sequence[int],
    skip_keys: int,
    max_positions: int = MAX_POSITIONS,
) -> SwitchedMaps:
    """Return the positional patterns of all combinations, of each head where heads were kept.

    Args:
        maps: score maps in the order of `combinations`.
        layers: the layers' numbers.
        skip_keys: how many first keys the patterns leave out.
        max_positions: larger maps are pooled to this many positions.
    """
    arrays = _arrays((_heads(captured, skip_keys) for captured in maps), skip_keys, max_positions)
    n_panels = arrays["maps"].shape[2]
    return SwitchedMaps(
        kind="pattern",
        skip_keys=skip_keys,
        layers=tuple(layers),
        panels=(HEADS, *(f"H{head}" for head in range(n_panels - 1))),
        **arrays,
    )


def _heads(maps: ScoreMaps, skip_keys: int) -> Measured:
    """Return the mean over heads and each head, as folds of scores and as patterns."""
    folds = maps.folds[:, :, None]
    if maps.per_head is not None and maps.per_head.shape[2] > 1:
        folds = torch.cat([folds, maps.per_head], 2)
    return folds, row_centred(pooled(folds, maps.counts), skip_keys, maps.query_positions), maps


def strongest_layer(view: SwitchedMaps) -> int:
    """Return the place of the layer whose intact pattern, the mean over heads, is strongest."""
    amplitudes = view.measures[0, :, 0, MEASURES.index("amplitude"), 0]
    return int(np.argmax(np.nan_to_num(amplitudes)))


def left_alone(view: SwitchedMaps, layer: int) -> Float[np.ndarray, " player"]:
    """Return what is left without each player alone of the mean over heads of a layer's pattern."""
    left = view.left(layer, panel=0)
    return left[[1 << bit for bit in range(len(left).bit_length() - 1)]]


def stage_view(
    stages: Iterable[Sequence[StageMaps]],
    layers: Sequence[int],
    absent: Sequence[Mapping[Letter, str]],
    skip_keys: int,
) -> SwitchedMaps:
    """Return the stages of some blocks in all combinations.

    Args:
        stages: per combination, in the order of `combinations`, the stages of each block.
        layers: the blocks' numbers.
        absent: per block, the stages that it lacks, and why.
        skip_keys: how many first keys the measures leave out.
    """
    arrays = _arrays(map(_letters, stages), skip_keys, MAX_POSITIONS)
    why = tuple({str(letter): reason for letter, reason in missing.items()} for missing in absent)
    return SwitchedMaps(
        kind="circuit",
        skip_keys=skip_keys,
        layers=tuple(layers),
        panels=LETTERS,
        absent=why,
        **arrays,
    )


def _letters(blocks: Sequence[StageMaps]) -> Measured:
    """Return the stages of some blocks, from (a) to (i); those that a block lacks are NaN."""
    blank = torch.full_like(next(iter(blocks[0].folds.values())), torch.nan)
    panels = [[block.folds.get(letter, blank) for letter in LETTERS] for block in blocks]
    folds = torch.stack([torch.stack(of_block, 1) for of_block in panels], 1)
    return folds, pooled(folds, blocks[0].counts), blocks[0]


def explorer_of(
    maps: Mapping[Condition, StoredMaps],
    players: PlayerSet,
    skip_keys: int,
    kept: Mapping[Condition, Sequence[KeptPattern]],
    replacement: str = "",
) -> Explorer:
    """Return the explorer of the conditions of some players, which the run has captured.

    It opens on the layer with the strongest pattern, without the source that this needs most.

    Args:
        maps: score maps of all conditions.
        players: what the switches remove.
        skip_keys: how many first keys the patterns leave out.
        kept: what each condition leaves of every layer's pattern.
        replacement: what a removed weight is replaced by, if there is one.
    """
    replaced = f" ({replacement} in place of a removed weight)" if replacement else ""
    conditions = combinations(players)
    small = [
        [_pooled_pattern(layer, skip_keys) for layer in maps[condition].layers]
        for condition in conditions
    ]
    view = SwitchedMaps(
        kind="pattern",
        skip_keys=skip_keys,
        layers=tuple(layer.index for layer in maps[conditions[0]].layers),
        panels=(HEADS,),
        maps=np.stack([[layer.values for layer in layers] for layers in small]),
        measures=np.stack([_intervals(kept[condition])[:, None] for condition in conditions]),
        block=small[0][0].block,
    )
    components, layer = components_of(players), strongest_layer(view)
    return Explorer(
        title="Remove components, and see what is left of the positional pattern",
        players=components,
        views=(view,),
        components=[],
        removed=strongest_source(left_alone(view, layer), components),
        layer=layer,
        note="Maps and numbers are the run's own, over all its sequences. A switch removes its "
        f"component as the run did{replaced}. Brackets: 95% intervals.",
        max_bytes=PAGE_BYTES,
    )


def _pooled_pattern(layer: StoredLayer, skip_keys: int) -> Pooled:
    queries = layer.folds.query_positions
    pattern = row_centred(layer.mean[...], skip_keys, queries)
    return pool(pattern[None].numpy(), MAX_POSITIONS, queries.numpy())
