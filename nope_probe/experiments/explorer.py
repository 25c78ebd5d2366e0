"""The explorer of a model: its leads and patterns without what a reader chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from nope_probe.analyses.attribution import conditions_of
from nope_probe.analyses.contrasts import ContrastGram, contrast_grams, lost, positional
from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.components import Component, Gain
from nope_probe.conditions import INTACT, Condition
from nope_probe.errors import closed_choices
from nope_probe.experiments.ablation.plan import equivalent, make_plan
from nope_probe.experiments.engine import (
    Engine,
    as_sequences,
    folds_for_intervals,
    idle_sources,
    irreplaceable,
    name_of,
)
from nope_probe.figures.explorer import Explorer, RemovedMaps
from nope_probe.figures.names import words
from nope_probe.figures.panels import Pooled, RowMaps, pool_with_leads
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given, first_keys_of, layers_of
from nope_probe.hooks.removing.removals import Substitute
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.hooks.removing.targets import components
from nope_probe.maps.centred import kept_cells
from nope_probe.maps.layers import LayerMaps, shared_patterns
from nope_probe.models.parity import describe
from nope_probe.runtime.processes import Progress

PAGE_BYTES = 900_000  # next to all other maps of a report
MAX_POSITIONS = 64  # of a map in the explorer, however long the sequences are
HEADS = "mean over heads"
Panels = Mapping[Condition, Sequence[Sequence[LayerMaps]]]  # [layer][panel] of each condition


@closed_choices("replacement", "gain", "skip_keys")
def explore(
    model: HookedModel,
    tokens: Given,
    *,
    remove: Sequence[str] | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    replacement: Replacement = "mean",
    gain: Gain = "output",
    skip_keys: int | Literal["auto"] = "auto",
) -> Explorer:
    """Run a model without each source and weight, and return the choice for a notebook.

    The explorer shows each head's pattern, its first key's lead, and what is lost of both. It opens
    on the layer with the strongest pattern, without the mask. A progress bar goes to stderr.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: `Sequences`, or what `capture_scores` takes; vectors for a parameter-free model.
            Some dozens of sequences suffice.
        remove: what can be removed besides the sources: components, the circuits `qk` and `ov`,
            unions such as `w_q+mlp`; `["sources"]` for the sources alone. By default W_Q, W_K, W_O
            and the circuits, if the model has them.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from, 4 or more; by default 8, or as many
            as there are sequences (documents) if these are fewer.
        replacement: what a removed weight is replaced by.
        gain: the size of the replacements identity and random.
        skip_keys: how many keys count as first; `auto`: 1 for tokens, 0 for vectors.

    Returns:
        An explorer that notebooks show, and that `save` writes as a page.

    Raises:
        UserError: for components that the model lacks.

    Example:
        >>> from nope_probe import figures, load, sequences
        >>> loaded = load("nope-tiny", n_layers=2)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=8, seq_len=12)
        >>> explorer = figures.explore(loaded.model, data, remove=["qk"], n_folds=4)
        >>> explorer.view.maps.shape  # condition, layer, head and their mean, query, key
        (3, 2, 5, 12, 12)
    """
    data, has, name = as_sequences(model, tokens), components(model), name_of(model)
    skipped = first_keys_of(data.inputs) if skip_keys == "auto" else skip_keys
    kept_cells(data.inputs.shape[1], skipped)  # raises where no keys are left
    left_out = irreplaceable(model) | idle_sources(model, data.inputs, len(layers_of(model)))
    by = Substitute(replacement=replacement, gain=gain)
    plan = make_plan(
        has,
        remove if remove is None else [item for item in remove if item != "sources"],
        substitutes=[by],
        parameter_free=describe(model, name).parameter_free,
        left_out=left_out,
    )
    engine = Engine(
        model=model,
        inputs=data.inputs,
        documents=data.documents,
        batch_size=batch_size,
        n_folds=folds_for_intervals(data, n_folds),
        skip_keys=skipped,
    ).calibrated(None, plan.ablations)
    needed = conditions_of(plan.sources, plan.removed)
    run = dict.fromkeys(equivalent(condition, by) for condition in needed)
    captured = {
        condition: _panels(engine, by, condition)
        for condition in Progress(run, desc="patterns", leave=False)
    }
    panels = {condition: captured[equivalent(condition, by)] for condition in needed}
    shown = [*plan.of_sources, *plan.removed]
    replaced = f" A removed weight's replacement is {replacement}." if plan.replacing else ""
    return explorer_of(
        panels,
        plan.sources,
        shown,
        layers=[layer.index for layer in layers_of(model)],
        title=f"The positional pattern of {name or 'a model'}, component by component",
        note=f"Means over {len(data.inputs):,} sequences of {data.inputs.shape[1]} positions. What "
        f"is removed is removed in every layer.{replaced} Brackets: 95% intervals.",
    )


def _panels(engine: Engine, by: Substitute, condition: Condition) -> list[list[LayerMaps]]:
    """Return the maps of each layer: the mean over heads, and each head if there are several."""
    maps = engine.scores(None, by.without(condition) if condition else None, per_head=True)
    return [
        [layer, *(layer.heads if len(layer.heads) > 1 else ())] for layer in maps.by_layer.values()
    ]


def explorer_of(
    maps: Panels,
    sources: Sequence[Component],
    shown: Sequence[Condition],
    *,
    layers: Sequence[int],
    title: str,
    note: str,
    panels: Sequence[str] | None = None,
    together: bool = False,
    max_bytes: int | None = None,
) -> Explorer:
    """Return the explorer of leads and patterns in some conditions.

    It opens on the layer with the strongest intact pattern, of the weakest run where panels are
    runs, without the mask.

    Args:
        maps: score maps by layer and panel, in all conditions that losses need.
        sources: the sources.
        shown: the conditions to choose from, the intact model first.
        layers: the layers' numbers.
        title: the explorer's title.
        note: sentences about the maps.
        panels: the panels' names; by default the mean over heads, then the heads.
        together: whether all panels are shown at once, as runs are.
        max_bytes: of the page.
    """
    n_panels = len(maps[INTACT][0])
    measures = np.stack(
        [
            np.stack(
                [
                    _numbers({one: of[place][panel] for one, of in maps.items()}, sources, shown)
                    for panel in range(n_panels)
                ],
                1,
            )
            for place in range(len(layers))
        ],
        1,
    )
    small = [
        [[_pooled(maps[c][i][p]) for p in range(n_panels)] for i in range(len(layers))]
        for c in shown
    ]
    names = panels or (HEADS, *(f"H{head}" for head in range(n_panels - 1)))
    view = RemovedMaps(
        conditions=tuple(condition.name for condition in shown),
        labels=tuple(words(one.name) if one else "nothing" for one in shown),
        layers=tuple(layers),
        panels=tuple(names),
        maps=np.array([[[x.values[0] for x in row] for row in rows] for rows in small]),
        leads=np.array([[[_leads(x) for x in row] for row in rows] for rows in small]),
        measures=measures,
        block=small[0][0][0].block,
    )
    amplitudes = np.nan_to_num(measures[0, :, :, 2, 0])
    strongest = amplitudes.min(-1) if together else amplitudes[:, 0]
    options = {} if max_bytes is None else {"max_bytes": max_bytes}
    return Explorer(
        title=title,
        view=view,
        layer=int(strongest.argmax()),
        removed=min(1, len(shown) - 1),
        note=note,
        together=together,
        **options,
    )


def _numbers(
    maps: Mapping[Condition, LayerMaps], sources: Sequence[Component], shown: Sequence[Condition]
) -> Float[np.ndarray, "condition 4 3"]:
    """Return lead, lead lost, amplitude and pattern lost of one panel, each with its interval."""
    patterns = dict(zip(maps, shared_patterns([*maps.values()]), strict=True))
    grams = contrast_grams(patterns)
    rows = [
        [
            number
            for question in ("lead", "pattern")
            for number in _of(grams.get(question), one, sources)
        ]
        for one in shown
    ]
    return np.array([[[x.value, x.low, x.high] for x in row] for row in rows])


def _of(
    gram: ContrastGram[Condition] | None, removed: Condition, sources: Sequence[Component]
) -> tuple[Interval, Interval]:
    """Return the size of a lead or pattern without some components, and what is lost of it."""
    if gram is None:
        return UNDEFINED, UNDEFINED
    whole = positional(INTACT, sources)
    share = gram.share(lost(removed, sources), whole) if removed else UNDEFINED
    return gram.size({removed: 1.0}), share


def _pooled(layer: LayerMaps) -> Pooled:
    pattern = layer.pattern.mean_with_lead()
    maps = RowMaps(values=pattern[None].numpy(), queries=layer.queries.numpy())
    return pool_with_leads(maps, MAX_POSITIONS, layer.skip_keys)


def _leads(maps: Pooled) -> Float[np.ndarray, " query_block"]:
    return np.full(len(maps.values[0]), np.nan) if maps.leads is None else maps.leads[0]
