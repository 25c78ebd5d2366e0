"""Estimates with their intervals: as dots, as a curve in its band, and as dots over layers.

A layer whose pattern does not exceed the noise has undefined shares; it is marked "no pattern".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figures.intervals import (
    FLAT,
    NO_PATTERN,
    SHARES,
    axis_range,
    error_bars,
    estimates_of,
    is_noise,
    padded_range,
)
from nope_probe.figures.names import colour, symbol, words
from nope_probe.figures.style import (
    BLANK,
    GRID,
    PlotlyTrace,
    axis,
    draw_panels,
    inside,
    scatter,
)

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
    dots = {
        other: at,
        value: estimates[0],
        f"error_{value}": error_bars(*estimates),
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


@dataclass(frozen=True)
class Dots:
    """A series of estimates over layers, from a table with a row per layer.

    Attributes:
        rows: `layer`, and the column with its bounds (see `bound_columns`).
        name: a component's name, which fixes colour and marker.
        column: the column to draw; NaN without an estimate.
        label: its name in the legend; the component's label if empty.
        hollow: whether the markers are open.
        marker: colour and symbol, instead of the component's.
    """

    rows: pd.DataFrame
    name: str
    column: str = ""
    label: str = ""
    hollow: bool = False
    marker: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def layers(self) -> list[int]:
        """Layer numbers, from 0."""
        return self.rows["layer"].astype(int).tolist()

    @cached_property
    def estimates(self) -> Float[np.ndarray, "3 layer"]:
        """Estimates and the bounds of their 95% intervals."""
        return estimates_of(self.rows, self.column)


def over_layers(
    panels: Mapping[str, Sequence[Dots]],
    title: str,
    columns: int | None = None,
    same_y: Sequence[Sequence[int]] = (),
) -> go.Figure:
    """Draw series over layers, a panel for each kind of number, with one legend.

    All panels zoom together along the layers. A panel without a number that exceeds its noise is
    drawn flat, with a note.

    Args:
        panels: series by the panel's title; every panel has at least one.
        title: the figure's title.
        columns: panels in a row; all in a single row if None. A deep model gets half as many.
        same_y: groups of panels, by their numbers, that share one scale.
    """
    layers = sorted({at for of_panel in panels.values() for dots in of_panel for at in dots.layers})
    traces = {
        name: [
            _layer_dots(series, WIDTH * ((index + 0.5) / len(of_panel) - 0.5))
            for index, series in enumerate(of_panel)
        ]
        for name, of_panel in panels.items()
    }
    many, deep = (columns or 1) > 1, len(layers) > MOST_TICKS
    n_names = len({trace["name"] for of_panel in traces.values() for trace in of_panel})
    across = columns or len(panels)
    figure = draw_panels(
        title,
        traces,
        zoom="x",
        columns=max(1, across // 2) if deep else across,
        panel=170 if many or deep else 260,
        x_title="layer",
        bottom=60 + LEGEND_ROW * -(-n_names // 6),
    )
    figure.update_xaxes(
        range=[layers[0] - 0.5, layers[-1] + 0.5],
        showgrid=False,
        zeroline=False,
        tick0=0,
        dtick=-(-len(layers) // MOST_TICKS),
        minor={"tick0": 0.5, "dtick": 1, "showgrid": True, "gridcolor": GRID},
    )
    figure.update_yaxes(rangemode="tozero", zerolinewidth=2, nticks=5)
    _mark_panels(figure, panels)
    ends = [np.concatenate([s.estimates for s in of_panel], axis=1) for of_panel in panels.values()]
    fit_axes(figure, "y", ends, same_y)
    return figure


def _layer_dots(series: Dots, offset: float) -> PlotlyTrace:
    size = 9 if len(series.layers) <= MOST_TICKS else 6
    is_share = series.column.startswith(SHARES)
    shown = f"%{{y:.1%}} {PERCENT}" if is_share else f"%{{y:.3g}} {BOUNDS}"
    return interval_dots(
        np.asarray(series.layers, float) + offset,
        series.estimates,
        label=series.label or words(series.name),
        hover=f"%{{text}}: {shown}",
        marker={**marker(series.name, size, series.hollow), **series.marker},
        text=[f"L{layer}" for layer in series.layers],
        cliponaxis=False,  # markers at zero are whole
    )


def _mark_panels(figure: go.Figure, panels: Mapping[str, Sequence[Dots]]) -> None:
    """Show shares in percent, and mark the layers in which no series of a panel has a number."""
    note = {**NOTE, "text": NO_PATTERN, "textangle": -90}
    for panel, of_panel in enumerate(panels.values()):
        if all(series.column.startswith(SHARES) for series in of_panel):
            figure.layout[f"yaxis{axis(panel)}"].tickformat = ".0%"
        values = pd.concat([pd.Series(s.estimates[0], index=s.layers) for s in of_panel])
        known = values.groupby(level=0).count()
        where = {**inside(panel), "xref": f"x{axis(panel)}", "y": 0.5}
        for layer in known.index[known == 0]:
            figure.add_annotation(**note, **where, x=layer)


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
