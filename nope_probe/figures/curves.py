"""Curves of each layer -> plotly figures, a panel per layer: bands, distances and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import curve_in_band, note_flat
from nope_probe.figures.intervals import (
    axis_range,
    error_bars,
    estimates_of,
)
from nope_probe.figures.names import TABLE, colour, words
from nope_probe.figures.style import PlotlyTrace, draw_panels, scatter
from nope_probe.removal import INK

MOST_COLUMNS = 4
LABELS = {"score": "scores", "pattern": "positional pattern"}
DASHES = ("dot", "dash", "dashdot", "longdash")
LINES = ["#7d6be0", "#1d87c9", "#2b9a58"]  # colours between these show on paper and on dark screens


def band_amplitudes(table: pd.DataFrame) -> go.Figure:
    """Draw the RMS of each RoPE band's part of the positional pattern, a panel per layer.

    Args:
        table: `bands.csv`: layer, band, the amplitude in nats with its bounds, and the share.
    """
    layers = [(rows, estimates_of(rows, "amplitude")) for _, rows in table.groupby("layer")]
    bars: list[list[PlotlyTrace]] = [
        [
            {
                "type": "bar",
                "x": rows["band"].astype(str).tolist(),
                "y": ends[0],
                "error_y": error_bars(*ends),
                "customdata": 100 * rows["share"].to_numpy(float),
                "marker": {"color": TABLE["rope"].colour},
                "showlegend": False,
                "hovertemplate": "%{x}: %{y:.3g} nats, share %{customdata:.1f}%<extra></extra>",
            }
        ]
        for rows, ends in layers
    ]
    title, x_title = "The positional pattern by RoPE band", "wavelength, positions"
    figure = _layer_panels(table, bars, title, x_title, "xy", bottom=120, ticks=50)
    figure.update_yaxes(range=axis_range(*estimates_of(table, "amplitude")))
    note_flat(figure, [ends for _, ends in layers])
    return figure


def offset_profiles(table: pd.DataFrame) -> go.Figure:
    """Draw the mean of the scores, or of each source's term, by distance, a panel per layer.

    Args:
        table: `offsets.csv`: layer, term, offset, and the mean in nats with its bounds.
    """
    panels: list[list[PlotlyTrace]] = []
    for _, of_layer in table.groupby("layer"):
        panels.append([])
        for name, rows in of_layer.groupby("term", sort=False):
            ink = colour("intact" if name in LABELS else str(name))
            panels[-1] += curve_in_band(
                _middles(rows, "offset"),
                estimates_of(rows, "mean"),
                label=LABELS.get(str(name), words(str(name))),
                hover="%{x}: %{y:.3g} nats",
                line={"color": ink, "width": 2, "dash": "dot" if name == "score" else "solid"},
            )
    title = "Mean by distance from query to key"
    # Softmax ignores the scores' level, which differs between layers.
    zoom = "x" if "score" in set(table["term"]) else "xy"
    figure = _layer_panels(table, panels, title, "distance i - j", zoom)
    if "last_offset" in table:  # bins that grow with distance
        figure.update_xaxes(type="log")
    return figure


def query_strengths(table: pd.DataFrame, lengths: Mapping[str, int]) -> go.Figure:
    """Draw the RMS of the pattern at each query's position, a panel per layer.

    Args:
        table: `queries.csv`: layer, the first and last query of a group, and rms (nats) with its
            bounds.
        lengths: the model's stated lengths, such as its context, in tokens; lines mark lengths that
            queries reach.
    """
    panels: list[list[PlotlyTrace]] = []
    last = int(table["last_query"].max())
    reached = {name: length for name, length in lengths.items() if length <= last}
    for _, rows in table.groupby("layer"):
        curve = curve_in_band(
            _middles(rows, "query"),
            estimates_of(rows, "rms"),
            label="pattern",
            hover="query %{x:.0f}: %{y:.3g} nats",
            line={"color": colour("intact"), "width": 2},
        )
        panels.append(curve)
        top = float(rows["rms_high"].max())
        for (name, length), dash in zip(reached.items(), cycle(DASHES), strict=False):
            line = {"color": INK, "width": 1, "dash": dash}
            ends = {"x": [length, length], "y": [0.0, top]}
            curve.append(scatter(f"{name} ({length:,})", "", **ends, mode="lines", line=line))
    title = "The strength of the positional pattern by query"
    return _layer_panels(table, panels, title, "query position", "x")


def _middles(rows: pd.DataFrame, name: str) -> np.ndarray:
    """Return the middle of each row's distances or queries."""
    last = f"last_{name}"
    first = rows[name].to_numpy(int)
    return (first + rows[last].to_numpy(int)) / 2 if last in rows else first


def _layer_panels(
    table: pd.DataFrame,
    panels: Sequence[Sequence[PlotlyTrace]],
    title: str,
    x_title: str,
    zoom: str,
    bottom: int = 84,
    ticks: int = 0,
) -> go.Figure:
    """Return a panel per layer; tick labels of x may stand on end, `ticks` px high."""
    names = [f"L{layer}" for layer in sorted({*table["layer"]})]
    return draw_panels(
        title,
        dict(zip(names, panels, strict=True)),
        zoom=zoom,
        columns=min(MOST_COLUMNS, len(names)),
        panel=200,
        row_gap=60 + ticks,
        bottom=bottom,
        x_title=x_title,
        y_title="nats",
    )
