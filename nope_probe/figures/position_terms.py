"""Below the graph of who writes position: maps of a reader's terms, and its mean keys as clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from nope_probe.figures.intervals import FLOOR, symmetric
from nope_probe.figures.maps import lead_divisor
from nope_probe.figures.names import short
from nope_probe.figures.panels import RowMaps, heat_map, pool_with_leads
from nope_probe.figures.style import ZERO, Layout, PlotlyTrace, colour_limits, panel_axes
from nope_probe.figures.words import with_readers

ALL = "all"  # the whole pattern; readers; or writers of a clock
WRITTEN = ("written_key", "written_query", "written_both")
TERMS = (ALL, "rotation", "alibi", *WRITTEN, "covariance")  # in the order of their panels
CLOCKS = 4  # panels: all writers together, and the strongest writers
LEAST = 0.01  # smallest share of a reader's whole with a map, or with an edge


class Below(NamedTuple):
    """The maps and clocks of a reader, the keys of their colours, and the panels' titles."""

    traces: list[PlotlyTrace]
    colours: Layout
    titles: list[str]


def terms_in(maps: Mapping[str, np.ndarray], readers: Sequence[str]) -> list[str]:
    """Return the terms that are not 0 in the maps of all readers."""
    sizes = {name: float(np.nanmax(np.abs(cells), initial=0.0)) for name, cells in maps.items()}
    return [
        term
        for term in TERMS
        if any(
            sizes.get(f"{name}/{term}", 0.0) > LEAST * sizes.get(f"{name}/{ALL}", 0.0)
            for name in readers
        )
    ]


def below_graph(
    reader: str,
    names: Sequence[str],
    maps: Mapping[str, np.ndarray],
    clocks: pd.DataFrame | None,
    max_positions: int,
    skip_keys: int,
) -> Below:
    """Return the maps of a reader's terms and its clocks.

    Args:
        reader: a layer or head.
        names: the terms with a panel.
        maps: the terms' patterns, see `position_circuit`.
        clocks: `clocks.csv`.
        max_positions: larger maps are pooled to this many positions.
        skip_keys: how many keys count as first.
    """
    traces, colours = _maps(reader, names, maps, max_positions, skip_keys)
    dials, titles = _dials_of(reader, clocks), [*map(short, names)]
    if names:
        titles[0] = f"<b>{reader}</b>: {titles[0]}"
    traces += [_dial(rows, at) for at, rows in enumerate(dials.values(), 1 + len(names))]
    return Below(traces, colours, [*titles, *dials])


def _maps(
    reader: str,
    names: Sequence[str],
    maps: Mapping[str, np.ndarray],
    max_positions: int,
    skip_keys: int,
) -> tuple[list[PlotlyTrace], Layout]:
    """Return the maps of a reader's terms, leads divided to have their colours, and the scale."""
    rows = {
        panel: RowMaps(
            values=np.asarray(maps[f"{reader}/{term}"], float)[None],
            queries=maps.get("query_positions"),
            skip_keys=skip_keys,
        )
        for panel, term in enumerate(names, start=1)
        if f"{reader}/{term}" in maps
    }
    cells = {panel: pool_with_leads(of_term, max_positions) for panel, of_term in rows.items()}
    top = max((symmetric(of_term.values, FLOOR) for of_term in cells.values()), default=FLOOR)
    divisor, traces = lead_divisor([*cells.values()], 0, top), list[PlotlyTrace]()
    keys = colour_limits((-top, top), "coloraxis.")
    for panel, of_term in cells.items():
        leads = None if of_term.leads is None else of_term.leads[0]
        traces += heat_map(
            of_term.values[0],
            float(of_term.block),
            panel,
            name=short(names[panel - 1]),
            leads=leads,
            divisor=divisor,
        )
        if leads is not None:
            keys["coloraxis.colorbar.title.text"] = f"nats; first key ÷ {divisor:.2g}"
    return traces, keys


def _dials_of(reader: str, clocks: pd.DataFrame | None) -> dict[str, pd.DataFrame]:
    """Return a reader's mean keys by panel title: of all writers, then of the strongest writers."""
    if clocks is None or clocks.empty:
        return {}
    rows = with_readers(clocks)
    rows = rows[(rows["reader"] == reader) & (rows["side"] == "key")]
    rows = rows.sort_values("position", kind="stable")
    return {
        f"<b>{reader}</b>: its mean keys" if writer == ALL else f"what {writer} adds": group
        for writer, group in list(rows.groupby("writer", sort=False))[:CLOCKS]
    }


def _dial(rows: pd.DataFrame, panel: int) -> PlotlyTrace:
    """Return the line of mean keys from the first position to the last."""
    return {
        "type": "scatter",
        "x": rows["axis_1"],
        "y": rows["axis_2"],
        **panel_axes(panel),
        "mode": "lines+markers",
        "line": {"color": ZERO, "width": 1},
        "marker": {"color": rows["position"], "coloraxis": "coloraxis2", "size": 5},
        "customdata": rows["position"],
        "hovertemplate": f"position %{{customdata}}<extra>{rows['writer'].iloc[0]}</extra>",
        "showlegend": False,
    }
