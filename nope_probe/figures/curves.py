"""Curves of each layer -> plotly figures: bands, distances, queries, and simulations.

A layer has a panel. Scores and patterns are of a model; the rows and steps of simulated maps stand
next to the theory's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import sample_colorscale

from nope_probe.figures.dots import curve_in_band, note_flat
from nope_probe.figures.intervals import (
    FLAT_WORDS,
    NOISE_ERRORS,
    NOISE_NATS,
    axis_range,
    error_bars,
    estimates_of,
    finite,
    widened,
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


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A series per layer, with errors and the values of the theory.

    Attributes:
        x: the values' places on the x axis.
        values, errors: estimates and two standard errors.
        theory: the mean field's values.
    """

    x: Float[np.ndarray, " x"]
    values: Float[np.ndarray, "layer x"]
    errors: Float[np.ndarray, "layer x"]
    theory: Float[np.ndarray, "layer x"]


def simulated_curves(
    curves: Mapping[str, Curves], *, title: str, x_title: str, y_title: str
) -> go.Figure:
    """Draw simulations as dots with two standard errors, and the theory as lines, per layer.

    A layer with only noise is flat, and its title says so.

    Args:
        curves: by the name in the legend.
        title: the figure's title.
        x_title: of the x axes.
        y_title: of the y axes.
    """
    n_layers = len(next(iter(curves.values())).values)
    ranges = [_noise_range(curves.values(), layer) for layer in range(n_layers)]
    figure = draw_panels(
        title,
        {
            f"L{layer}{FLAT_WORDS if limits else ''}": _simulated(curves, layer)
            for layer, limits in enumerate(ranges)
        },
        zoom="x",
        columns=min(MOST_COLUMNS, n_layers),
        panel=230,
        x_title=x_title,
        y_title=y_title,
        bottom=110,
    )
    for keys, limits in zip(figure.select_yaxes(), ranges, strict=True):
        if limits is not None:  # all but the middle is noise
            keys.update(range=limits, tickvals=[sum(limits) / 2], tickformat=".3~f")
    return figure


def _simulated(curves: Mapping[str, Curves], layer: int) -> list[PlotlyTrace]:
    """Return the theory and the simulation of a layer."""
    inks = sample_colorscale(LINES, list(np.linspace(0, 1, max(2, len(curves)))))
    traces: list[PlotlyTrace] = []
    hover = "%{x}: %{y:.4g} nat"
    for (name, series), ink in zip(curves.items(), inks, strict=False):
        theory = scatter(
            f"{name}, mean field",
            hover,
            x=series.x,
            y=series.theory[layer],
            mode="lines",
            line={"color": ink, "width": 1.5},
            legendgroup=name,
            showlegend=False,
        )
        simulation = scatter(
            name,
            hover,
            x=series.x,
            y=series.values[layer],
            error_y={"array": series.errors[layer], "thickness": 1, "width": 0},
            mode="markers",
            marker={"size": 4, "color": ink},
        )
        traces += [theory, simulation]
    return traces


def _noise_range(curves: Collection[Curves], layer: int) -> tuple[float, float] | None:
    """Return the y range of a layer whose curves are all noise; None for other layers."""
    known = finite(np.array([[curve.values[layer], curve.theory[layer]] for curve in curves]))
    errors = np.concatenate([curve.errors[layer] / 2 for curve in curves])
    if not known.size:
        return None
    floor = max(NOISE_NATS, NOISE_ERRORS * float(np.nanmedian(errors)))
    low, high, flat = widened(float(known.min()), float(known.max()), floor)
    return (low, high) if flat else None
