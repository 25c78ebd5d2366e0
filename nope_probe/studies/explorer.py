"""The explorer of a model: its leads and patterns without what a reader chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.analyses.attribution import patterns_of, values_in
from nope_probe.analyses.contrasts import Grams, contrast_grams
from nope_probe.analyses.jackknife import Interval
from nope_probe.figures.explorer import MEASURES, Explorer, RemovedMaps
from nope_probe.figures.names import words
from nope_probe.figures.panels import Pooled, RowMaps, pool_with_leads
from nope_probe.maps.layers import LayerMaps
from nope_probe.removal import INTACT, Condition
from nope_probe.studies.page import shown_layer
from nope_probe.studies.tables import columns_of

PAGE_BYTES = 900_000  # next to all other maps of a report
MAX_POSITIONS = 64  # of a map in the explorer, however long the sequences are
HEADS = "mean over heads"
# By condition, then [layer][panel].
ConditionPanels = Mapping[Condition, Sequence[Sequence[LayerMaps]]]


def explorer_of(
    maps: ConditionPanels,
    grams: Sequence[Sequence[Grams[Condition]]],
    *,
    layers: Sequence[int],
    title: str,
    note: str,
    max_bytes: int | None = None,
) -> Explorer:
    """Return the explorer of leads and patterns in some conditions.

    It opens on the layer that all commands show first, without the mask.

    Args:
        maps: score maps by layer and panel, in the conditions to choose from, the intact model
            first. The panels are the mean over heads, then the heads.
        grams: the inner products by layer and panel, of all conditions.
        layers: the layers' numbers.
        title: the explorer's title.
        note: sentences about the maps.
        max_bytes: of the page.
    """
    shown, n_panels = [*maps], len(maps[INTACT][0])
    values = [[[values_in(of, c, INTACT) for c in shown] for of in row] for row in grams]
    measures = np.array(
        [
            [[[_ends(getattr(x, of["name"])) for of in MEASURES] for x in panel] for panel in row]
            for row in values
        ]
    )
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
        measures=np.moveaxis(measures, 2, 0),
        block=small[0][0][0].block,
    )
    intact = [columns_of(of_layer[0][0], ("lead", "amplitude")) for of_layer in values]
    counts = maps[INTACT][0][0].counts.tolist()
    first = shown_layer(pd.DataFrame(intact).assign(layer=[*layers]), counts)
    options = {} if max_bytes is None else {"max_bytes": max_bytes}
    return Explorer(
        title=title,
        view=view,
        layer=0 if first is None else [*layers].index(first),
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


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def _pooled(layer: LayerMaps) -> Pooled:
    pattern = layer.pattern.mean_with_lead()
    values, queries = pattern[None].numpy(), layer.queries.numpy()
    maps = RowMaps(values=values, queries=queries, skip_keys=layer.skip_keys)
    return pool_with_leads(maps, MAX_POSITIONS)


def _leads(maps: Pooled) -> Float[np.ndarray, " query_block"]:
    return np.full(len(maps.values[0]), np.nan) if maps.leads is None else maps.leads[0]
