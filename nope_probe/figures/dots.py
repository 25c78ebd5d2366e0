"""Estimates with their intervals over layers: one dot per layer and name, at any depth.

A layer whose shares are undefined, since its pattern does not exceed the noise, is marked with the
words "no pattern".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.components import colour, symbol, words
from nope_probe.figures.grid import Grid, annotate, axis, inside, on, patch, place, zoom_together
from nope_probe.figures.intervals import (
    FLAT,
    NO_PATTERN,
    axis_range,
    bound_columns,
    error_bars,
    is_noise,
    padded_range,
)
from nope_probe.figures.style import BLANK, GRID

WIDTH = 0.6  # of a layer's dots, in layers
MOST_TICKS = 12
FLAT_NOTE = {
    "text": FLAT,
    "x": 0.5,
    "y": 0.98,
    "yanchor": "top",
    "showarrow": False,
    "bgcolor": BLANK,
    "font": {"size": 11},
}


@dataclass(frozen=True, kw_only=True)
class Dots:
    """One series of estimates over layers.

    Attributes:
        name: a component's name, which fixes colour and marker.
        label: its name in the legend.
        layers: layer numbers, from 0.
        values, lows, highs: estimates and their 95% intervals; NaN where there is none.
        hollow: whether the markers are open.
    """

    name: str
    label: str
    layers: Sequence[int]
    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    hollow: bool = False


def dots(
    rows: pd.DataFrame, name: str, column: str, label: str | None = None, hollow: bool = False
) -> Dots:
    """Return one series from the rows of a table, one per layer.

    Args:
        rows: `layer`, the column and its bounds (see `bound_columns`; without them the interval is
            the number itself).
        name: the component, which fixes colour and marker.
        column: the column to draw.
        label: its name in the legend; the component's label if None.
        hollow: whether the markers are open.
    """
    low, high = bound_columns(column)
    return Dots(
        name=name,
        label=label or words(name),
        layers=rows["layer"].astype(int).tolist(),
        values=rows[column].astype(float).tolist(),
        lows=rows.get(low, rows[column]).astype(float).tolist(),
        highs=rows.get(high, rows[column]).astype(float).tolist(),
        hollow=hollow,
    )


def over_layers(
    panels: Mapping[str, Sequence[Dots]],
    title: str,
    columns: int | None = None,
    unmarked: Collection[str] = (),
    same_y: Sequence[Sequence[int]] = (),
) -> go.Figure:
    """Draw series over layers, a panel for each kind of number, with one legend.

    All panels zoom together along the layers. Where no number of a panel exceeds its noise, the
    panel shows them as flat, and says so.

    Args:
        panels: series by the panel's title; every panel has at least one.
        title: the figure's title.
        columns: panels in a row; all in one row if None. A deep model gets half of them.
        unmarked: panels in which a layer without numbers may have a pattern: it is left blank.
        same_y: groups of panels, by their numbers, that share one scale.
    """
    n_layers = len(_layers(next(iter(panels.values()))))
    figure = go.Figure(
        [
            _trace(each, panel, WIDTH * ((index + 0.5) / len(series) - 0.5))
            for panel, series in enumerate(panels.values())
            for index, each in enumerate(series)
        ]
    )
    place(figure, title, list(panels), *_grids(len(panels), columns, n_layers))
    _mark_layers(figure, panels, unmarked)
    _set_ranges(figure, list(panels.values()), same_y or [[i] for i in range(len(panels))])
    return figure


def _grids(n_panels: int, columns: int | None, n_layers: int) -> tuple[Grid, Grid]:
    """Return the layouts for a wide and a narrow screen."""
    many, deep = columns is not None, n_layers > MOST_TICKS
    across = columns or n_panels
    wide = Grid(
        columns=max(1, across // 2) if deep else across,
        panel=170 if many or deep else 260,
        x_title="layer",
    )
    narrow = Grid(
        columns=2 if many and not deep else 1,
        panel=120 if many else 220,
        gap=0.14,
        left=40,
        bottom=130,
        x_title="layer",
    )
    return wide, narrow


def _trace(series: Dots, panel: int, offset: float) -> go.Scatter:
    values = np.asarray(series.values, float)
    bounds = np.asarray([series.lows, series.highs], float)
    shape = symbol(series.name) + ("-open" if series.hollow else "")
    size = 9 if len(series.layers) <= MOST_TICKS else 6
    return go.Scatter(
        x=np.asarray(series.layers, float) + offset,
        y=values,
        error_y=error_bars(values, *bounds),
        customdata=np.column_stack([series.layers, *bounds]),
        mode="markers",
        cliponaxis=False,  # markers at zero are whole
        **on(panel),
        name=series.label,
        legendgroup=series.label,
        showlegend=panel == 0,
        marker={"color": colour(series.name), "symbol": shape, "size": size},
        hovertemplate=(
            "L%{customdata[0]}: %{y:.3g} "
            f"(%{{customdata[1]:.3g}} to %{{customdata[2]:.3g}})<extra>{series.label}</extra>"
        ),
    )


def _mark_layers(
    figure: go.Figure, panels: Mapping[str, Sequence[Dots]], unmarked: Collection[str]
) -> None:
    """Tick and separate the layers, and mark those without a pattern."""
    notes: list[dict[str, Any]] = []
    keys: dict[str, Any] = {}
    for panel, (title, series) in enumerate(panels.items()):
        layers = _layers(series)
        empty = [] if title in unmarked else [each for each in layers if _is_empty(series, each)]
        every = -(-len(layers) // MOST_TICKS)
        x, y = f"xaxis{axis(panel)}", f"yaxis{axis(panel)}"
        keys[f"{x}.range"] = [layers[0] - 0.5, layers[-1] + 0.5]
        keys |= {f"{x}.showgrid": False, f"{x}.zeroline": False}
        keys |= {f"{x}.tick0": 0, f"{x}.dtick": every}
        between = {"tick0": 0.5, "dtick": 1, "showgrid": True, "gridcolor": GRID}
        keys[f"{x}.minor"] = between
        keys |= {f"{y}.rangemode": "tozero", f"{y}.zerolinewidth": 2, f"{y}.nticks": 5}
        for layer in empty:
            where = {**inside(panel), "xref": f"x{axis(panel)}", "x": layer, "y": 0.5}
            notes.append({"text": NO_PATTERN, "textangle": -90, "bgcolor": BLANK, **where})
    font = {"showarrow": False, "font": {"size": 11}}
    patch(figure, keys)
    annotate(figure, [{**note, **font} for note in notes])


def _set_ranges(
    figure: go.Figure, panels: Sequence[Sequence[Dots]], groups: Sequence[Sequence[int]]
) -> None:
    """Match the axes that show the same, and keep noise flat."""
    zoom_together(figure, len(panels), also_y=False)
    keys: dict[str, Any] = {}
    noise: list[int] = []
    for first, *others in groups:
        keys |= {f"yaxis{axis(each)}.matches": f"y{axis(first)}" for each in others}
        ends = np.concatenate([_ends(panels[each]) for each in (first, *others)], axis=1)
        limits = axis_range(*ends)
        if limits is None and others:  # plotly.js gives a panel without numbers a range of its own
            limits = padded_range(ends)
        if limits is not None:
            keys |= {f"yaxis{axis(each)}.range": limits for each in (first, *others)}
        noise += [each for each in (first, *others) if is_noise(*_ends(panels[each]))]
    patch(figure, keys)
    note_flat(figure, noise)


def note_flat(figure: go.Figure, panels: Iterable[int]) -> None:
    """Note in some panels that what they show is flat within its noise."""
    annotate(figure, [{**inside(panel), **FLAT_NOTE} for panel in panels])


def _ends(series: Sequence[Dots]) -> Float[np.ndarray, "3 dot"]:
    rows = [[each.values, each.lows, each.highs] for each in series]
    return np.concatenate([np.asarray(row, float) for row in rows], axis=1)


def _layers(series: Sequence[Dots]) -> list[int]:
    return sorted({layer for each in series for layer in each.layers})


def _is_empty(series: Sequence[Dots], layer: int) -> bool:
    return all(
        np.isnan(value)
        for each in series
        for at, value in zip(each.layers, each.values, strict=True)
        if at == layer
    )
