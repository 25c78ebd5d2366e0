"""The explorer of a model: its leads and patterns without what a reader chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from nope_probe.analyses.attribution import patterns_of
from nope_probe.analyses.contrasts import ContrastGram, Grams, contrast_grams, lost, positional
from nope_probe.analyses.jackknife import UNDEFINED, Interval
from nope_probe.figures.explorer import Explorer, RemovedMaps
from nope_probe.figures.names import words
from nope_probe.figures.panels import Pooled, RowMaps, pool_with_leads
from nope_probe.maps.layers import LayerMaps
from nope_probe.removal import INTACT, Condition

PAGE_BYTES = 900_000  # next to all other maps of a report
MAX_POSITIONS = 64  # of a map in the explorer, however long the sequences are
HEADS = "mean over heads"
# By condition, then [layer][panel].
ConditionPanels = Mapping[Condition, Sequence[Sequence[LayerMaps]]]


def explorer_of(
    maps: ConditionPanels,
    grams: Sequence[Sequence[Grams[Condition]]],
    sources: Sequence[str],
    shown: Sequence[Condition],
    *,
    layers: Sequence[int],
    title: str,
    note: str,
    max_bytes: int | None = None,
) -> Explorer:
    """Return the explorer of leads and patterns in some conditions.

    It opens on the layer with the strongest intact pattern, without the mask.

    Args:
        maps: score maps by layer and panel, in the conditions to choose from.
        grams: the inner products by layer and panel, of all conditions that losses need.
        sources: the sources.
        shown: the conditions to choose from, the intact model first.
        layers: the layers' numbers.
        title: the explorer's title.
        note: sentences about the maps.
        max_bytes: of the page.
    """
    n_panels = len(maps[INTACT][0])
    numbers = [[_numbers(of_panel, sources, shown) for of_panel in row] for row in grams]
    measures = np.moveaxis(np.array(numbers), 2, 0)
    small = [
        [[_pooled(maps[c][i][p]) for p in range(n_panels)] for i in range(len(layers))]
        for c in shown
    ]
    view = RemovedMaps(
        conditions=tuple(condition.name for condition in shown),
        labels=tuple(words(condition.name) if condition else "nothing" for condition in shown),
        layers=tuple(layers),
        panels=(HEADS, *(f"H{head}" for head in range(n_panels - 1))),
        maps=np.array([[[x.values[0] for x in row] for row in rows] for rows in small]),
        leads=np.array([[[_leads(x) for x in row] for row in rows] for rows in small]),
        measures=measures,
        block=small[0][0][0].block,
    )
    options = {} if max_bytes is None else {"max_bytes": max_bytes}
    return Explorer(
        title=title,
        view=view,
        layer=int(np.nan_to_num(measures[0, :, 0, 2, 0]).argmax()),
        removed=min(1, len(shown) - 1),
        note=note,
        **options,
    )


def panel_grams(maps: ConditionPanels) -> list[list[Grams[Condition]]]:
    """Return the inner products of the conditions of each panel, by layer and panel."""
    by_panel = {
        condition: {(i, p): panel for i, row in enumerate(rows) for p, panel in enumerate(row)}
        for condition, rows in maps.items()
    }
    return [
        [contrast_grams(patterns_of(by_panel, (i, p))) for p in range(len(row))]
        for i, row in enumerate(maps[INTACT])
    ]


def _numbers(
    grams: Grams[Condition], sources: Sequence[str], shown: Sequence[Condition]
) -> Float[np.ndarray, "condition 4 3"]:
    """Return lead, lead lost, amplitude and pattern lost of one panel, each with its interval."""
    rows = [
        [
            number
            for question in ("lead", "pattern")
            for number in _of(grams.get(question), condition, sources)
        ]
        for condition in shown
    ]
    return np.array([[[x.value, x.low, x.high] for x in row] for row in rows])


def _of(
    gram: ContrastGram[Condition] | None, removed: Condition, sources: Sequence[str]
) -> tuple[Interval, Interval]:
    """Return the size of a lead or pattern without some components, and what is lost of it."""
    if gram is None:
        return UNDEFINED, UNDEFINED
    whole = positional(INTACT, sources)
    share = gram.share(lost(removed, sources), whole) if removed else UNDEFINED
    return gram.size({removed: 1.0}), share


def _pooled(layer: LayerMaps) -> Pooled:
    pattern = layer.pattern.mean_with_lead()
    values, queries = pattern[None].numpy(), layer.queries.numpy()
    maps = RowMaps(values=values, queries=queries, skip_keys=layer.skip_keys)
    return pool_with_leads(maps, MAX_POSITIONS)


def _leads(maps: Pooled) -> Float[np.ndarray, " query_block"]:
    return np.full(len(maps.values[0]), np.nan) if maps.leads is None else maps.leads[0]
