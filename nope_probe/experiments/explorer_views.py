"""From captured maps of all combinations to an explorer and the arrays that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.pattern_changes import KeptPattern, kept_patterns
from nope_probe.analyses.shapley import Condition, PlayerSet
from nope_probe.components import LETTERS, Letter
from nope_probe.figures.explorer import MEASURES, Explorer, SwitchedMaps
from nope_probe.maps.centred import row_centred
from nope_probe.maps.downsample import pool
from nope_probe.maps.folds import pooled
from nope_probe.maps.maps import ScoreMaps, StageMaps
from nope_probe.maps.stored_maps import StoredMaps

PAGE_BYTES = 900_000  # beside all other maps of a report
MAX_POSITIONS = 64  # of a map in the explorer, however long the sequences are
HEADS = "mean over heads"
Folds = Float[Tensor, "fold layer panel query_pos key_pos"]
Mean = Float[Tensor, "layer panel query_pos key_pos"]


def combinations(players: PlayerSet) -> list[Condition]:
    """Return the condition of each combination: bit k of its place says that player k is removed.

    Example:
        >>> from nope_probe.analyses.shapley import player_set
        >>> [sorted(each) for each in combinations(player_set(["mask", "rope"]))]
        [[], ['mask'], ['rope'], ['mask', 'rope']]
    """
    return [
        players.condition(
            [each for bit, each in enumerate(players.players) if not number >> bit & 1]
        )
        for number in range(2 ** len(players.players))
    ]


def _arrays(
    combinations: Iterable[tuple[Folds, Mean, Int[Tensor, " fold"]]],
    skip_keys: int,
    max_positions: int,
) -> dict[str, Any]:
    """Return `maps`, `measures` and `block` of all combinations, as `SwitchedMaps` holds them.

    Args:
        combinations: per combination, the intact model first, the fold means that panels are
            measured from, the panels as they are shown, and sequences per fold. No folds are held
            but the intact model's.
        skip_keys: how many first keys the measures leave out.
        max_positions: larger maps are pooled to this many positions.
    """
    intact: Folds | None = None
    maps, measures, block = [], [], 1
    for folds, shown, counts in combinations:
        intact = folds if intact is None else intact
        kept = kept_patterns(folds.flatten(1, 2), intact.flatten(1, 2), skip_keys, counts)
        small = pool(shown.flatten(0, 1).cpu().double().numpy(), max_positions)
        maps.append(small.values.reshape(*shown.shape[:2], *small.values.shape[1:]))
        measures.append(_intervals(kept).reshape(*shown.shape[:2], 3, 3))
        block = small.block
    return {"maps": np.stack(maps), "measures": np.stack(measures), "block": block}


def _intervals(kept: Sequence[KeptPattern]) -> Float[np.ndarray, "panel 3 3"]:
    intervals = [[getattr(each, name) for name in MEASURES] for each in kept]
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
    arrays = _arrays((_heads(each, skip_keys) for each in maps), skip_keys, max_positions)
    n_panels = arrays["maps"].shape[2]
    return SwitchedMaps(
        kind="pattern",
        layers=tuple(layers),
        panels=(HEADS, *(f"H{head}" for head in range(n_panels - 1))),
        **arrays,
    )


def _heads(maps: ScoreMaps, skip_keys: int) -> tuple[Folds, Mean, Int[Tensor, " fold"]]:
    """Return the mean over heads and each head, as folds of scores and as patterns."""
    folds = maps.folds[:, :, None]
    if maps.per_head is not None and maps.per_head.shape[2] > 1:
        folds = torch.cat([folds, maps.per_head], 2)
    return folds, row_centred(pooled(folds, maps.counts), skip_keys), maps.counts


def strongest_layer(view: SwitchedMaps) -> int:
    """Return the place of the layer whose intact pattern, the mean over heads, is strongest."""
    amplitudes = view.measures[0, :, 0, MEASURES.index("amplitude"), 0]
    return int(np.argmax(np.nan_to_num(amplitudes)))


def stage_view(
    stages: Iterable[Sequence[StageMaps]],
    layers: Sequence[int],
    absent: Sequence[Mapping[Letter, str]],
    skip_keys: int,
    max_positions: int = MAX_POSITIONS,
) -> SwitchedMaps:
    """Return the stages of some blocks in all combinations.

    Args:
        stages: per combination, in the order of `combinations`, the stages of each block.
        layers: the blocks' numbers.
        absent: per block, the stages that it lacks, and why.
        skip_keys: how many first keys the measures leave out.
        max_positions: larger maps are pooled to this many positions.
    """
    arrays = _arrays(map(_letters, stages), skip_keys, max_positions)
    why = tuple({str(letter): reason for letter, reason in each.items()} for each in absent)
    return SwitchedMaps(kind="circuit", layers=tuple(layers), panels=LETTERS, absent=why, **arrays)


def _letters(blocks: Sequence[StageMaps]) -> tuple[Folds, Mean, Int[Tensor, " fold"]]:
    """Return the stages of some blocks, from (a) to (i); those that a block lacks are NaN."""
    counts, known = blocks[0].counts, next(iter(blocks[0].folds.values()))
    blank = torch.full_like(known, torch.nan)
    panels = [[block.folds.get(letter, blank) for letter in LETTERS] for block in blocks]
    folds = torch.stack([torch.stack(of_block, 1) for of_block in panels], 1)
    return folds, pooled(folds, counts), counts


def explorer_of(
    maps: Mapping[Condition, StoredMaps],
    players: PlayerSet,
    skip_keys: int,
    kept: Mapping[Condition, Sequence[KeptPattern]],
    replacement: str = "",
) -> Explorer:
    """Return the explorer of the conditions of some players, which the run has captured.

    It opens on the layer with the strongest pattern.

    Args:
        maps: score maps of all conditions.
        players: what the switches remove.
        skip_keys: how many first keys the patterns leave out.
        kept: what each condition leaves of every layer's pattern.
        replacement: what a removed weight is replaced by, if there is one.
    """
    replaced = f" ({replacement} in place of a removed weight)" if replacement else ""
    found = combinations(players)
    small = [
        [
            pool(row_centred(layer.mean[...], skip_keys)[None].numpy(), MAX_POSITIONS)
            for layer in maps[condition].layers
        ]
        for condition in found
    ]
    view = SwitchedMaps(
        kind="pattern",
        layers=tuple(layer.index for layer in maps[found[0]].layers),
        panels=(HEADS,),
        maps=np.stack([[layer.values for layer in layers] for layers in small]),
        measures=np.stack([_intervals(kept[condition])[:, None] for condition in found]),
        block=small[0][0].block,
    )
    return Explorer(
        title="Remove components, and see what is left of the positional pattern",
        players={each.name: sorted(each.components) for each in players.players},
        views=(view,),
        components=[],
        layer=strongest_layer(view),
        note=f"A switch removes its component as the run did{replaced}; brackets are 95% "
        "intervals.",
        max_bytes=PAGE_BYTES,
    )
