"""Estimates with their intervals: as dots, as cells, and as a curve in its band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figures.limits import FLAT, axis_range, is_noise, padded_range
from nope_probe.figures.names import colour, symbol
from nope_probe.figures.style import (
    BLANK,
    PlotlyTrace,
    axis,
    inside,
    scatter,
)

BAR = {"thickness": 1.5, "width": 3}  # px, of error bars
WIDTH = 0.6  # width of a layer's dots, in layers
MOST_TICKS = 12
LEGEND_ROW = 26  # px; of six names
BOUNDS = "(%{customdata[0]:.3g} to %{customdata[1]:.3g})"  # in hover texts
PERCENT = BOUNDS.replace(".3g", ".1%")  # where the axis is in percent
NOTE = {"bgcolor": BLANK, "showarrow": False, "font": {"size": 11}}
FLAT_NOTE = {**NOTE, "text": FLAT, "x": 0.5, "y": 0.98, "yanchor": "top"}


def marker(name: str, size: int, hollow: bool = False) -> dict[str, object]:
    """Return the marker of a component, in its colour and shape of all figures."""
    shape = symbol(name) + ("-open" if hollow else "")
    return {"color": colour(name), "symbol": shape, "size": size}


def interval_dots(
    at: Sequence[Any] | np.ndarray,
    estimates: Float[np.ndarray, "3 dot"],
    *,
    label: str,
    hover: str,
    marker: Mapping[str, object],
    sideways: bool = False,
    **others: object,
) -> PlotlyTrace:
    """Return estimates as dots with error bars.

    Args:
        at: the dots' places on the axis across the estimates.
        estimates: estimates, lower and upper bounds.
        label: the name in the legend.
        hover: the hover text; `BOUNDS` becomes the interval.
        marker: colour, symbol and size.
        sideways: whether the estimates are along x.
        others: further keys of the trace, by plotly's names.
    """
    value, other = ("x", "y") if sideways else ("y", "x")
    middles, lows, highs = estimates
    arms = {"array": highs - middles, "arrayminus": middles - lows}
    dots = {
        other: at,
        value: middles,
        f"error_{value}": {**arms, "type": "data", "symmetric": False, **BAR},
        "customdata": estimates[1:].T,
        "mode": "markers",
        "marker": marker,
    }
    return scatter(label, hover, **dots | others)


def interval_cells(
    estimates: Float[np.ndarray, "3 row column"], hover: str, **others: object
) -> PlotlyTrace:
    """Return estimates as a heat map on the figure's colour axis; it is blank without an estimate.

    Args:
        estimates: estimates, lower and upper bounds.
        hover: the hover text, in which `BOUNDS` are the bounds.
        others: further keys of the trace, by plotly's names.
    """
    return {
        "type": "heatmap",
        "z": estimates[0],
        "customdata": np.moveaxis(estimates[1:], 0, -1),
        "coloraxis": "coloraxis",
        "hoverongaps": False,
        "hovertemplate": hover,
        **others,
    }


def curve_in_band(
    x: np.ndarray,
    estimates: Float[np.ndarray, "3 x"],
    *,
    label: str,
    hover: str,
    line: Mapping[str, object],
    **others: object,
) -> list[PlotlyTrace]:
    """Return estimates as a curve, and the band between their bounds.

    Args:
        x: the curve's places along x.
        estimates: estimates, lower and upper bounds.
        label: the name in the legend.
        hover: the hover text; `BOUNDS` becomes the interval.
        line: its colour, width and dash.
        others: further keys of the curve, by plotly's names.
    """
    values, lows, highs = estimates
    band = {
        "type": "scatter",
        "x": np.concatenate([x, x[::-1]]),
        "y": np.concatenate([highs, lows[::-1]]),
        "fill": "toself",
        "mode": "none",
        "fillcolor": line["color"],
        "opacity": 0.2,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": label,
    }
    curve = {"x": x, "y": values, "customdata": estimates[1:].T, "mode": "lines", "line": line}
    return [band, scatter(label, hover, **curve | others)]


def fit_axes(
    figure: go.Figure,
    along: str,
    ends: Sequence[Float[np.ndarray, "3 _"]],
    groups: Sequence[Sequence[int]] = (),
) -> None:
    """Match the axes of panels on one scale, and keep noise flat, with a note.

    Args:
        figure: the figure with its panels.
        along: `x` or `y`, the axes that the numbers are along.
        ends: each panel's estimates, lower and upper bounds.
        groups: panels, by their numbers, that share one scale; by default no panels share one.
    """
    for group in groups or [[panel] for panel in range(len(ends))]:
        estimates = np.concatenate([ends[panel] for panel in group], axis=1)
        limits = axis_range(*estimates)
        if limits is None and len(group) > 1:  # plotly.js scales a panel without numbers itself
            limits = padded_range(estimates)
        for panel in group:
            matched = None if panel == group[0] else f"{along}{axis(group[0])}"
            figure.layout[f"{along}axis{axis(panel)}"].update(matches=matched, range=limits)
    note_flat(figure, ends)


def note_flat(figure: go.Figure, ends: Sequence[Float[np.ndarray, "3 _"]]) -> None:
    """Note in the panels whose numbers do not exceed their noise that they are flat."""
    for panel, estimates in enumerate(ends):
        if is_noise(*estimates):
            figure.add_annotation(**inside(panel), **FLAT_NOTE)
