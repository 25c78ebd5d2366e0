"""The explorer of a model: its maps in every combination of removed components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.pattern import query_stride
from nope_probe.analyses.pattern_changes import KeptPattern, kept_pattern
from nope_probe.analyses.shapley import PlayerSet
from nope_probe.components import Gain
from nope_probe.conditions import INTACT, Condition
from nope_probe.errors import closed_choices
from nope_probe.experiments.ablation.plan import make_plan
from nope_probe.experiments.engine import (
    Engine,
    as_sequences,
    folds_for_intervals,
    idle_sources,
    irreplaceable,
    name_of,
)
from nope_probe.figures.explorer import MEASURES, Explorer, SwitchedMaps, strongest_source
from nope_probe.figures.panels import Pooled, RowMaps, pool
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given, first_keys_of, layers_of
from nope_probe.hooks.removing.removals import Substitute
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.hooks.removing.targets import components
from nope_probe.maps.centred import kept_cells, row_centred
from nope_probe.maps.folds import pooled
from nope_probe.maps.layers import LayerMaps, shared_patterns
from nope_probe.maps.maps import Layers, ScoreMaps
from nope_probe.maps.rows import choose_rows
from nope_probe.models.parity import describe
from nope_probe.runtime.processes import Progress

PAGE_BYTES = 900_000  # beside all other maps of a report
MAX_POSITIONS = 64  # of a map in the explorer, however long the sequences are
HEADS = "mean over heads"
Folds = Float[Tensor, "fold layer panel row key_pos"]
Mean = Float[Tensor, "layer panel row key_pos"]
# The folds that panels are measured from, the panels as they are shown, and their maps.
Combination = tuple[Folds, Mean, ScoreMaps]


@closed_choices("replacement", "gain", "skip_keys")
def explore(
    model: HookedModel,
    tokens: Given,
    *,
    players: Sequence[str] | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    replacement: Replacement = "identity",
    gain: Gain = "output",
    skip_keys: int | Literal["auto"] = "auto",
) -> Explorer:
    """Run a model in every combination of removed components, and return switches for a notebook.

    The model runs 2^k times for k players. A progress bar goes to stderr. The explorer opens on the
    layer with the strongest pattern, without the source that this pattern needs most.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: `Sequences`, or what `capture_scores` takes; vectors for a parameter-free model.
            Some dozens of sequences suffice.
        players: what each switch removes: components, the circuits `qk` and `ov`, unions such as
            `w_q+mlp`; `["sources"]` for the mask and the position encoding. At most 10. By default
            mask, rope, w_q, w_k and w_o, as far as the model has them.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from, 4 or more; by default 8, or as many
            as there are sequences (documents) if these are fewer.
        replacement: what a removed weight is replaced by.
        gain: the size of the replacements identity and random.
        skip_keys: first keys that patterns leave out; `auto`: 1 for tokens, 0 for vectors.

    Returns:
        An explorer that notebooks show, and that `save` writes as a page.

    Raises:
        UserError: for players that the model lacks, or more than 10.

    Example:
        >>> from nope_probe import figures, load, sequences
        >>> loaded = load("nope-tiny", n_layers=2)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=8, seq_len=12)
        >>> explorer = figures.explore(loaded.model, data, players=["mask", "qk"], n_folds=4)
        >>> explorer.view.maps.shape  # combination, layer, head and their mean, query, key
        (4, 2, 5, 12, 12)
    """
    data, has, name = as_sequences(model, tokens), components(model), name_of(model)
    skipped = first_keys_of(data.inputs) if skip_keys == "auto" else skip_keys
    kept_cells(data.inputs.shape[1], skipped)  # raises where no keys are left
    left_out = irreplaceable(model) | idle_sources(model, data.inputs, len(layers_of(model)))
    plan = make_plan(has, players, describe(model, name).parameter_free, left_out=left_out)
    substitute = Substitute(replacement=replacement, gain=gain)
    ablations = [substitute.without(condition) for condition in combinations(plan.switches)]
    engine = Engine(
        model=model,
        inputs=data.inputs,
        documents=data.documents,
        batch_size=batch_size,
        n_folds=folds_for_intervals(data, n_folds),
        skip_keys=skipped,
    ).calibrated(None, ablations)
    done = Progress(ablations, desc="patterns", leave=False)
    scores = (engine.scores(None, ablation, per_head=True) for ablation in done)
    view = pattern_view(scores, [layer.index for layer in layers_of(model)])
    return Explorer(
        title=f"The positional pattern of {name or 'a model'}, component by component",
        view=view,
        **opening(view, plan.switches),
        note=note_on(engine, substitute),
    )


def note_on(engine: Engine, substitute: Substitute) -> str:
    """Return a description of an explorer's maps, in a few sentences."""
    (n_seqs, n_pos), skip_keys = engine.inputs.shape[:2], engine.skip_keys
    stride = query_stride(len(choose_rows(n_pos, engine.query_rows)))
    ordered = "" if stride == 1 else f" Locality is of 1 query in {stride}, counted from query 0."
    return (
        f"Maps and numbers are means over {n_seqs:,} sequences of {n_pos} "
        f"positions{_among(skip_keys)}. A switch removes its component in every layer; a removed "
        f"weight's replacement is {substitute.replacement}. Brackets: 95% intervals.{ordered}"
    )


def _among(skip_keys: int | None) -> str:
    """Return which keys numbers are of, for the end of a sentence; nothing for all keys."""
    first = "first key" if skip_keys == 1 else f"first {skip_keys} keys"
    return f", among the keys after the {first}" if skip_keys else ""


def combinations(players: PlayerSet) -> list[Condition]:
    """Return the condition of each combination: bit k of its place says that player k is removed.

    Example:
        >>> from nope_probe.analyses.shapley import player_set
        >>> [sorted(gone) for gone in combinations(player_set(["mask", "rope"]))]
        [[], ['mask'], ['rope'], ['mask', 'rope']]
    """
    kept = [
        [player for bit, player in enumerate(players.players) if not number >> bit & 1]
        for number in range(2 ** len(players.players))
    ]
    return [players.condition(some) for some in kept]


def _arrays(combinations: Iterable[Combination]) -> dict[str, Any]:
    """Return what `SwitchedMaps` holds of all combinations: maps, measures, block, skip_keys.

    Args:
        combinations: their maps, the intact model's first. Only the intact model's folds are held.
    """
    intact: Folds | None = None
    maps, measures, block, skip_keys = [], [], 1, 0
    for folds, shown, source in combinations:
        intact, queries = folds if intact is None else intact, source.query_positions
        skip_keys = source.skip_keys
        panels = (
            [LayerMaps.of(x, source.counts, queries, skip_keys) for x in of.flatten(1, 2).unbind(1)]
            for of in (folds, intact)
        )
        kept = [_kept(*both) for both in zip(*panels, strict=True)]
        cells = shown.flatten(0, 1).cpu().double().numpy()
        small = pool(RowMaps(values=cells, queries=queries.numpy()), MAX_POSITIONS)
        maps.append(small.values.reshape(*shown.shape[:2], *small.values.shape[1:]))
        measures.append(_intervals(kept).reshape(*shown.shape[:2], 3, 3))
        block = small.block
    stacked = {"maps": np.stack(maps), "measures": np.stack(measures)}
    return {**stacked, "block": block, "skip_keys": skip_keys}


def _intervals(kept: Sequence[KeptPattern]) -> Float[np.ndarray, "panel 3 3"]:
    intervals = [[getattr(pattern, name) for name in MEASURES] for pattern in kept]
    return np.array([[[i.value, i.low, i.high] for i in row] for row in intervals])


def pattern_view(maps: Iterable[ScoreMaps], layers: Sequence[int]) -> SwitchedMaps:
    """Return the positional patterns of all combinations, of each head where heads were kept.

    Args:
        maps: score maps in the order of `combinations`.
        layers: the layers' numbers.
    """
    arrays = _arrays(map(_heads, maps))
    n_panels = arrays["maps"].shape[2]
    return SwitchedMaps(
        layers=tuple(layers),
        panels=(HEADS, *(f"H{head}" for head in range(n_panels - 1))),
        **arrays,
    )


def _heads(maps: ScoreMaps) -> Combination:
    """Return the mean over heads and each head, as folds of scores and as patterns."""
    folds = maps.folds[:, :, None]
    if maps.per_head is not None and maps.per_head.shape[2] > 1:
        folds = torch.cat([folds, maps.per_head], 2)
    means, skip_keys = pooled(folds, maps.counts), maps.skip_keys or 0
    return folds, row_centred(means, skip_keys, maps.query_positions), maps


def opening(view: SwitchedMaps, players: PlayerSet) -> dict[str, Any]:
    """Return `players`, `layer` and `removed`, as `Explorer` holds them.

    An explorer opens on the layer whose intact pattern, the mean over heads, is strongest, without
    the source that this pattern needs most.
    """
    components_of = _components_of(players)
    amplitudes = view.measures[0, :, 0, MEASURES.index("amplitude"), 0]
    layer = int(np.argmax(np.nan_to_num(amplitudes)))
    left_alone = view.left(layer, panel=0)[[1 << bit for bit in range(len(components_of))]]
    removed = strongest_source(left_alone, components_of)
    return {"players": components_of, "layer": layer, "removed": removed}


def _components_of(players: PlayerSet) -> dict[str, list[str]]:
    return {player.name: sorted(player.components) for player in players.players}


def explorer_of(
    maps: Mapping[Condition, Layers],
    players: PlayerSet,
    kept: Mapping[Condition, Sequence[KeptPattern]],
    replacement: str = "",
) -> Explorer:
    """Return the explorer of the conditions of some players, which the run has captured.

    Args:
        maps: score maps of all conditions.
        players: what the switches remove.
        kept: what each condition leaves of every layer's pattern.
        replacement: what a removed weight is replaced by, if there is one.
    """
    replaced = f" ({replacement} in place of a removed weight)" if replacement else ""
    conditions = combinations(players)
    small = [
        [_pooled_pattern(layer) for layer in maps[condition].values()] for condition in conditions
    ]
    view = SwitchedMaps(
        skip_keys=next(iter(maps[conditions[0]].values())).skip_keys,
        layers=tuple(maps[conditions[0]]),
        panels=(HEADS,),
        maps=np.stack([[layer.values for layer in layers] for layers in small]),
        measures=np.stack([_intervals(kept[condition])[:, None] for condition in conditions]),
        block=small[0][0].block,
    )
    return Explorer(
        title="Remove components, and see what is left of the positional pattern",
        view=view,
        **opening(view, players),
        note="Maps and numbers are the run's own, over all its sequences. A switch removes its "
        f"component as the run did{replaced}. Brackets: 95% intervals.",
        max_bytes=PAGE_BYTES,
    )


def runs_explorer(runs: Mapping[str, Mapping[Condition, Layers]], players: PlayerSet) -> Explorer:
    """Return the explorer of several runs, whose patterns one set of switches changes.

    It opens on the layer where the weakest of the runs' intact patterns is strongest.

    Args:
        runs: by label, score maps of the same layers, in the conditions of `combinations`.
        players: what the switches remove.
    """
    conditions = combinations(players)
    layers = tuple(next(iter(runs.values()))[INTACT])
    panels = [  # combination, layer, run
        [[maps[condition][layer] for maps in runs.values()] for layer in layers]
        for condition in conditions
    ]
    small = [[[*map(_pooled_pattern, row)] for row in rows] for rows in panels]
    kept = [[[*map(_kept, *rows)] for rows in zip(some, panels[0], strict=True)] for some in panels]
    view = SwitchedMaps(
        skip_keys=panels[0][0][0].skip_keys,
        layers=layers,
        panels=tuple(runs),
        maps=np.array([[[cells.values[0] for cells in row] for row in rows] for rows in small]),
        measures=np.array([[*map(_intervals, rows)] for rows in kept]),
        block=small[0][0][0].block,
    )
    return Explorer(
        title="The sources of the pattern, run beside run",
        view=view,
        players=_components_of(players),
        layer=int(view.measures[0, :, :, MEASURES.index("amplitude"), 0].min(-1).argmax()),
        beside=True,
        note=f"Maps and numbers are the runs' own{_among(view.skip_keys)}. A switch removes its "
        "source in every run that has it. Each run has a colour scale of its own. Brackets: 95% "
        "intervals.",
        max_bytes=PAGE_BYTES,
    )


def _kept(maps: LayerMaps, intact: LayerMaps) -> KeptPattern:
    return kept_pattern(*shared_patterns([maps, intact]))


def _pooled_pattern(layer: LayerMaps) -> Pooled:
    pattern = row_centred(layer.mean(), layer.skip_keys, layer.queries)
    maps = RowMaps(values=pattern[None].numpy(), queries=layer.queries.numpy())
    return pool(maps, MAX_POSITIONS)
