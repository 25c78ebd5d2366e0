"""Shares with their intervals -> plotly figures: sources, players, terms and interactions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import Dots, dots, over_layers
from nope_probe.figures.grid import Grid, place
from nope_probe.figures.intervals import NO_PATTERN, bound_columns, error_bars
from nope_probe.figures.maps import add_slider
from nope_probe.figures.style import colour, symbol
from nope_probe.figures.words import words

MOST_INTERACTIONS = 24
PLAYER_PARTS = {
    "share": "Shapley share",
    "lost": "lost without it",
    "alone": "there alone",
    "amplification": "amplification",
}


def source_shares(table: pd.DataFrame) -> go.Figure:
    """Draw each source's share of the pattern, per layer, and its RMS in nats.

    Args:
        table: `sources.csv`: layer, term, rms (nats) and share, each with its bounds; the term
            `position`, the sum of all but content, is not drawn.
    """
    terms = table[table["term"] != "position"]
    panels = {
        "share of the pattern": _by_name(terms, "term", "share"),
        "RMS, nats": _by_name(terms, "term", "rms"),
    }
    return over_layers(panels, title="The sources of the positional pattern, per layer")


def player_shares(table: pd.DataFrame) -> go.Figure:
    """Draw each player's share, what is lost without it and there alone, and its amplification.

    Args:
        table: the rows of `players.csv` that belong to one player set.
    """
    panels = {
        title: [dots for dots in _by_name(table, "player", column) if _has_numbers(dots)]
        for column, title in PLAYER_PARTS.items()
    }
    panels["Shapley share"] = _by_name(table, "player", "share")
    return over_layers(
        {title: series for title, series in panels.items() if series},
        title="The players' parts in the positional pattern, per layer",
        unmarked=("there alone", "amplification"),
    )


def mean_covariance_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the mean and covariance terms' shares and RMS, per layer, and the mean's dimensions.

    Args:
        table: `mean_covariance.csv`: layer, term, and share, rms (nats) and dimensions, each with
            its bounds.
    """
    named = table.assign(term=table["term"].astype(str) + "_term")
    panels = {
        "share of the pattern": _by_name(named, "term", "share"),
        "RMS, nats": _by_name(named, "term", "rms"),
        "dimensions of the mean keys": _by_name(
            named[named["term"] == "mean_term"], "term", "dimensions"
        ),
    }
    return over_layers(panels, title="The mean term and the covariance term of the scores")


def interactions(table: pd.DataFrame, layer: int = 0) -> go.Figure:
    """Draw the shares that players add only together, with a layer slider.

    Of many interactions those with the largest share in any layer are drawn.

    Args:
        table: the rows of `interactions.csv` that belong to one player set; `players` joined by
            `+`.
        layer: which layer the slider shows first.
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
    title = "Interactions of players"
    place(figure, title, [""], wide, replace(wide, left=175))
    add_slider(figure, len(layers), 1, layers.index(layer))
    figure.update_layout(xaxis={"zeroline": True, "zerolinewidth": 2, "nticks": 5})
    figure.update_layout(xaxis={"tickangle": 0}, yaxis={"tickfont": {"size": 11}})
    figure.update_layout(showlegend=False)
    return figure


def _interaction_trace(rows: pd.DataFrame, layer: int) -> go.Scatter:
    columns = ("share", *bound_columns("share"))
    shares, lows, highs = (rows[name].to_numpy(float) for name in columns)
    empty = bool(np.isnan(shares).all())
    return go.Scatter(
        x=np.zeros_like(shares) if empty else shares,
        y=[words(str(name)) for name in rows.index],
        error_x=error_bars(shares, lows, highs),
        customdata=np.column_stack([lows, highs]),
        mode="text" if empty else "markers",
        text=NO_PATTERN,
        name=f"L{layer}",
        marker={"color": colour("interaction"), "symbol": symbol("interaction"), "size": 8},
        hovertemplate=(
            "%{y}<br>%{x:.3g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})"
            f"<extra>L{layer}</extra>"
        ),
    )


def _by_name(table: pd.DataFrame, by: str, column: str) -> list[Dots]:
    return [dots(rows, str(name), column) for name, rows in table.groupby(by, sort=False)]


def _has_numbers(series: Dots) -> bool:
    return not np.isnan(np.asarray(series.values)).all()
