"""Shares with their intervals -> plotly figures: one dot per layer and term, whatever the depth.

A share that does not exist, because the layer has no pattern that could be told from noise, is said
in the figure: "no pattern".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figure_style import (
    GRID,
    Grid,
    add_meta,
    axis,
    colour,
    place,
    symbol,
    words,
)

SPREAD = 0.6
MOST_INTERACTIONS = 24


@dataclass(frozen=True, kw_only=True)
class Dots:
    """One series of estimates over layers.

    Attributes:
        name: a component's name, which fixes colour and marker.
        label: what the legend says.
        layers: layers, from 1.
        values, lows, highs: estimates and their 95% intervals; NaN where there is none.
    """

    name: str
    label: str
    layers: Sequence[int]
    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


def dots(table: pd.DataFrame, by: str, column: str = "share") -> list[Dots]:
    """Read one series per name from a table with a row per layer and name.

    Args:
        table: columns `layer`, `by`, the column and its bounds (`low` and `high` for a share, else
            `<column>_low` and `<column>_high`; none for a number without an interval).
        by: the column that holds the names.
        column: the column to draw.
    """
    low, high = ("low", "high") if column == "share" else (f"{column}_low", f"{column}_high")
    return [
        Dots(
            name=str(name),
            label=words(str(name)),
            layers=rows["layer"].tolist(),
            values=rows[column].tolist(),
            lows=rows.get(low, rows[column]).tolist(),
            highs=rows.get(high, rows[column]).tolist(),
        )
        for name, rows in table.groupby(by, sort=False)
    ]


def source_shares(table: pd.DataFrame) -> go.Figure:
    """Draw what each source brings to the pattern, per layer, as RMS and as a share.

    Args:
        table: `sources.csv`: layer, term, rms, rms_low, rms_high (nats), share, low, high.
    """
    panels = {
        "share of the pattern (all terms add to 1)": dots(table, "term"),
        "strength (RMS), nats": dots(table, "term", "rms"),
    }
    return _panels(panels, title="What each source brings to the pattern, per layer")


def player_shares(table: pd.DataFrame) -> go.Figure:
    """Draw share, sufficiency and necessity of each player of one game, per layer.

    Args:
        table: the rows of `players.csv` that belong to one game.
    """
    panels = {
        "share (all players add to 1)": dots(table, "player"),
        "sufficiency: what it brings alone": dots(table, "player", "sufficiency"),
        "necessity: what is lost without it": dots(table, "player", "necessity"),
    }
    return _panels(panels, title="What the pattern needs, per layer")


def route_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the share of the mean and of the content route, per layer, and the dimensions of the first.

    Args:
        table: `routes.csv`: layer, route, share, low, high, rms, rms_low, rms_high, dimensions.
    """
    named = table.assign(route="route_" + table["route"].astype(str))
    panels = {
        "share of the pattern": dots(named, "route"),
        "strength (RMS), nats": dots(named, "route", "rms"),
    }
    return _panels(panels, title="The two routes by which position reaches the score, per layer")


def interactions(table: pd.DataFrame, layer: int = 1) -> go.Figure:
    """Draw what only several players together bring, with a layer slider.

    Args:
        table: the rows of `interactions.csv` that belong to one game; `players` joined by `+`.
        layer: which layer is seen first, from 1.

    Of many interactions the largest (by the largest share in any layer) are drawn.
    """
    largest = table.assign(size=table["share"].abs()).groupby("players")["size"].max()
    names = largest.fillna(0).sort_values(ascending=False).index[:MOST_INTERACTIONS]
    layers = sorted(table["layer"].unique())
    figure = go.Figure()
    for each in layers:
        rows = table[table["layer"] == each].set_index("players").reindex(names[::-1])
        figure.add_trace(_interaction_trace(rows, int(each), visible=each == layer))
    steps = [
        {"label": str(each), "method": "restyle", "args": ["visible", [e == each for e in layers]]}
        for each in layers
    ]
    title = "What players bring only together"
    grid = Grid(columns=1, row_height=120 + 22 * len(names), left=180, bottom=110, row_gap=0)
    place(figure, title, [""], grid, grid)
    figure.update_layout(sliders=[{"active": layers.index(layer), "steps": steps}])
    figure.update_layout(xaxis={"title": "share of the pattern", "zeroline": True})
    add_meta(figure, n_layers=len(layers), first=layer)
    return figure


def _interaction_trace(rows: pd.DataFrame, layer: int, visible: bool) -> go.Scatter:
    shares = rows["share"].to_numpy(float)
    return go.Scatter(
        x=shares,
        y=[words(str(name)) for name in rows.index],
        error_x=_bars(shares, rows["low"].to_numpy(float), rows["high"].to_numpy(float)),
        mode="markers",
        name=f"layer {layer}",
        showlegend=False,
        visible=visible,
        marker={"color": colour("interaction"), "symbol": symbol("interaction"), "size": 8},
        hovertemplate="%{y}<br>share %{x:.3f}<extra>layer " + str(layer) + "</extra>",
    )


def _panels(panels: Mapping[str, Sequence[Dots]], title: str) -> go.Figure:
    """Draw series over layers, a panel for each kind of number, with one legend."""
    figure = go.Figure()
    for panel, series in enumerate(panels.values()):
        for index, each in enumerate(series):
            offset = SPREAD * ((index + 0.5) / len(series) - 0.5)
            figure.add_trace(_trace(each, panel, offset))
    wide = Grid(columns=len(panels), row_height=340)
    place(figure, title, list(panels), wide, Grid(columns=1, row_height=280, bottom=130))
    for panel, series in enumerate(panels.values()):
        _say_no_pattern(figure, series, panel)
        at = axis(panel)
        figure.update_layout(
            {
                f"xaxis{at}": {"title": "layer", "dtick": 1, "showgrid": False},
                f"yaxis{at}": {"zeroline": True, "zerolinewidth": 2},
            }
        )
    return figure


def _trace(series: Dots, panel: int, offset: float) -> go.Scatter:
    values = np.asarray(series.values, float)
    return go.Scatter(
        x=np.asarray(series.layers, float) + offset,
        y=values,
        error_y=_bars(values, np.asarray(series.lows, float), np.asarray(series.highs, float)),
        customdata=np.stack([series.layers, series.lows, series.highs], axis=-1),
        mode="markers",
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        name=series.label,
        legendgroup=series.name,
        showlegend=panel == 0,
        marker={"color": colour(series.name), "symbol": symbol(series.name), "size": 9},
        hovertemplate=(
            "layer %{customdata[0]}: %{y:.3g} "
            f"(%{{customdata[1]:.3g}} to %{{customdata[2]:.3g}})<extra>{series.label}</extra>"
        ),
    )


def _bars(values: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> dict[str, object]:
    return {
        "type": "data",
        "symmetric": False,
        "array": highs - values,
        "arrayminus": values - lows,
        "thickness": 1.5,
        "width": 3,
    }


def _say_no_pattern(figure: go.Figure, series: Sequence[Dots], panel: int) -> None:
    empty = {
        layer
        for layer in {layer for each in series for layer in each.layers}
        if all(
            np.isnan(value)
            for each in series
            for at, value in zip(each.layers, each.values, strict=True)
            if at == layer
        )
    }
    for layer in sorted(empty):
        figure.add_annotation(
            text="no pattern",
            x=layer,
            y=0.5,
            xref=f"x{axis(panel)}",
            yref=f"y{axis(panel)} domain",
            textangle=-90,
            showarrow=False,
            bgcolor=GRID,
        )
