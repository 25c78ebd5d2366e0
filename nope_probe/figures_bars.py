"""Estimates with their intervals -> plotly figures: one dot per layer and name, at any depth.

A share that does not exist, because the layer's pattern cannot be told from noise, is said in the
figure: "no pattern".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figure_grid import Grid, axis, inside, patch, place
from nope_probe.figure_style import BLANK, GRID, colour, symbol, words
from nope_probe.figures import add_slider

SPREAD = 0.6
MOST_TICKS = 12
MOST_INTERACTIONS = 24


@dataclass(frozen=True, kw_only=True)
class Dots:
    """One series of estimates over layers.

    Attributes:
        name: a component's name, which fixes colour and marker.
        label: what the legend says.
        layers: layers, from 1.
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
    """Read one series from the rows of a table, one per layer.

    Args:
        rows: `layer`, the column and its bounds (`low` and `high` for a share, else `<column>_low`
            and `<column>_high`; a number without bounds has no interval).
        name: the component that they are about.
        column: the column to draw.
        label: what the legend says; the name's words if None.
        hollow: whether the markers are open.
    """
    low, high = ("low", "high") if column == "share" else (f"{column}_low", f"{column}_high")
    return Dots(
        name=name,
        label=label or words(name),
        layers=rows["layer"].astype(int).tolist(),
        values=rows[column].astype(float).tolist(),
        lows=rows.get(low, rows[column]).astype(float).tolist(),
        highs=rows.get(high, rows[column]).astype(float).tolist(),
        hollow=hollow,
    )


def _by_name(table: pd.DataFrame, by: str, column: str) -> list[Dots]:
    return [dots(rows, str(name), column) for name, rows in table.groupby(by, sort=False)]


def source_shares(table: pd.DataFrame) -> go.Figure:
    """Draw what each source brings to the pattern, per layer, as a share and in nats.

    Args:
        table: `sources.csv`: layer, term, rms, rms_low, rms_high (nats), share, low, high.
    """
    panels = {
        "share of the pattern": _by_name(table, "term", "share"),
        "strength (RMS), nats": _by_name(table, "term", "rms"),
    }
    return over_layers(panels, title="What each source brings to the pattern, per layer")


def player_shares(table: pd.DataFrame) -> go.Figure:
    """Draw share, sufficiency and necessity of each player of one game, per layer.

    Args:
        table: the rows of `players.csv` that belong to one game.
    """
    panels = {
        "share": _by_name(table, "player", "share"),
        "sufficiency: what it brings alone": _by_name(table, "player", "sufficiency"),
        "necessity: what is lost without it": _by_name(table, "player", "necessity"),
    }
    return over_layers(panels, title="What the pattern needs, per layer")


def route_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the shares of the mean and content routes, per layer, and the first's dimensions.

    Args:
        table: `routes.csv`: layer, route, share, low, high, rms, rms_low, rms_high, dimensions.
    """
    named = table.assign(route="route_" + table["route"].astype(str))
    panels = {
        "share of the pattern": _by_name(named, "route", "share"),
        "strength (RMS), nats": _by_name(named, "route", "rms"),
        "dimensions of the mean keys": _by_name(
            named[named["route"] == "route_mean"], "route", "dimensions"
        ),
    }
    return over_layers(panels, title="The two routes by which position reaches the score")


def over_layers(
    panels: Mapping[str, Sequence[Dots]], title: str, columns: int | None = None
) -> go.Figure:
    """Draw series over layers, a panel for each kind of number, with one legend."""
    figure = go.Figure(
        [
            _trace(each, panel, SPREAD * ((index + 0.5) / len(series) - 0.5))
            for panel, series in enumerate(panels.values())
            for index, each in enumerate(series)
        ]
    )
    many = columns is not None
    wide = Grid(columns=columns or len(panels), panel=170 if many else 260, x_title="layer")
    narrow = Grid(
        columns=2 if many else 1,
        panel=120 if many else 220,
        gap=0.14,
        left=40,
        bottom=130,
        x_title="layer",
    )
    place(figure, title, list(panels), wide, narrow)
    _mark_layers(figure, list(panels.values()))
    return figure


def _trace(series: Dots, panel: int, offset: float) -> go.Scatter:
    values = np.asarray(series.values, float)
    bounds = np.asarray([series.lows, series.highs], float)
    shape = symbol(series.name) + ("-open" if series.hollow else "")
    return go.Scatter(
        x=np.asarray(series.layers, float) + offset,
        y=values,
        error_y=_bars(values, *bounds),
        customdata=np.column_stack([series.layers, *bounds]),
        mode="markers",
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        name=series.label,
        legendgroup=series.label,
        showlegend=panel == 0,
        marker={"color": colour(series.name), "symbol": shape, "size": 9},
        hovertemplate=(
            "layer %{customdata[0]}: %{y:.3g} "
            f"(%{{customdata[1]:.3g}} to %{{customdata[2]:.3g}})<extra>{series.label}</extra>"
        ),
    )


def _bars(values: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> dict[str, object]:
    arms = {"array": highs - values, "arrayminus": values - lows}
    return {"type": "data", "symmetric": False, **arms, "thickness": 1.5, "width": 3}


def _mark_layers(figure: go.Figure, panels: Sequence[Sequence[Dots]]) -> None:
    """Tick and separate the layers, and say where there is no pattern."""
    said: list[dict[str, Any]] = []
    keys: dict[str, Any] = {}
    for panel, series in enumerate(panels):
        layers = sorted({layer for each in series for layer in each.layers})
        every = -(-len(layers) // MOST_TICKS)
        x, y = f"xaxis{axis(panel)}", f"yaxis{axis(panel)}"
        keys[f"{x}.range"] = [layers[0] - 0.5, layers[-1] + 0.5]
        keys |= {f"{x}.showgrid": False, f"{x}.zeroline": False}
        keys |= {f"{x}.tick0": 1, f"{x}.dtick": every}
        between = {"tick0": 0.5, "dtick": 1, "showgrid": True, "gridcolor": GRID}
        keys[f"{x}.minor"] = between
        keys |= {f"{y}.rangemode": "tozero", f"{y}.zerolinewidth": 2, f"{y}.nticks": 5}
        for layer in filter(partial(_is_empty, series), layers):
            where = {**inside(panel), "xref": f"x{axis(panel)}", "x": layer, "y": 0.5}
            said.append({"text": "no pattern", "textangle": -90, "bgcolor": BLANK, **where})
    font = {"showarrow": False, "font": {"size": 11}}
    patch(figure, keys)
    figure.update_layout(annotations=[*figure.layout.annotations, *({**s, **font} for s in said)])


def _is_empty(series: Sequence[Dots], layer: int) -> bool:
    return all(
        np.isnan(value)
        for each in series
        for at, value in zip(each.layers, each.values, strict=True)
        if at == layer
    )


def interactions(table: pd.DataFrame, layer: int = 1) -> go.Figure:
    """Draw what only several players together bring, with a layer slider.

    Args:
        table: the rows of `interactions.csv` that belong to one game; `players` joined by `+`.
        layer: which layer is seen first, from 1.

    Of many interactions those with the largest share in any layer are drawn.
    """
    sizes = table["share"].abs().groupby(table["players"]).max().fillna(0)
    names = sizes.sort_values(ascending=False, kind="stable").index[:MOST_INTERACTIONS]
    layers = sorted(int(each) for each in table["layer"].unique())
    rows = {each: table[table["layer"] == each].set_index("players") for each in layers}
    figure = go.Figure(
        [
            _interaction_trace(rows[each].reindex(names[::-1]), each).update(visible=each == layer)
            for each in layers
        ]
    )
    wide = Grid(columns=1, panel=30 + 22 * len(names), x_title="share of the pattern", left=210)
    title = "What players bring only together"
    place(figure, title, [""], wide, replace(wide, left=175))
    add_slider(figure, len(layers), 1, layers.index(layer) + 1)
    figure.update_layout(xaxis={"zeroline": True, "zerolinewidth": 2, "nticks": 5})
    figure.update_layout(xaxis={"tickangle": 0}, yaxis={"tickfont": {"size": 11}})
    figure.update_layout(showlegend=False)
    return figure


def _interaction_trace(rows: pd.DataFrame, layer: int) -> go.Scatter:
    shares, lows, highs = (rows[name].to_numpy(float) for name in ("share", "low", "high"))
    empty = bool(np.isnan(shares).all())
    return go.Scatter(
        x=np.zeros_like(shares) if empty else shares,
        y=[words(str(name)) for name in rows.index],
        error_x=_bars(shares, lows, highs),
        customdata=np.column_stack([lows, highs]),
        mode="text" if empty else "markers",
        text="no pattern",
        name=f"layer {layer}",
        marker={"color": colour("interaction"), "symbol": symbol("interaction"), "size": 8},
        hovertemplate=(
            "%{y}<br>%{x:.3g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})"
            f"<extra>layer {layer}</extra>"
        ),
    )
