"""Shares with their intervals -> plotly figures: sources, players, terms and interactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.components import colour, symbol, words
from nope_probe.figures.dots import FLAT_NOTE, Dots, dots, over_layers
from nope_probe.figures.grid import Grid, add_slider, axis, inside, patch, place
from nope_probe.figures.intervals import NO_PATTERN, bound_columns, error_bars
from nope_probe.figures.noise import axis_range, is_noise

MOST_INTERACTIONS = 24
X_TITLE = "share of the pattern"
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
        table: the rows of `players.csv` that belong to one player set; with several values of the
            column `replacement`, each has a row of panels, on the scales of the first.
    """
    groups = _by_replacement(table)
    columns = [each for each in PLAYER_PARTS if each == "share" or table[each].notna().any()]
    panels = {
        (f"{name}: " if name else "") + PLAYER_PARTS[column]: _players(rows, column)
        for name, rows in groups.items()
        for column in columns
    }
    return over_layers(
        panels,
        title="The players' parts in the positional pattern, per layer",
        columns=len(columns) if len(groups) > 1 else None,
        unmarked=[title for title in panels if not title.endswith(PLAYER_PARTS["share"])],
        same_y=[range(each, len(panels), len(columns)) for each in range(len(columns))],
    )


def _players(rows: pd.DataFrame, column: str) -> list[Dots]:
    """Return a part of each player, without players for which it is undefined (all may be)."""
    series = _by_name(rows, "player", column)
    known = [each for each in series if column == "share" or not np.isnan(each.values).all()]
    return known or series


def _by_replacement(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each replacement by its name, which is empty if there is one alone."""
    if "replacement" not in table or table["replacement"].nunique() < 2:
        return {"": table}
    return {str(name): rows for name, rows in table.groupby("replacement", sort=False)}


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
            `+`. Each value of the column `replacement` has a panel, on one scale.
        layer: which layer the slider shows first.
    """
    sizes = table["share"].abs().groupby(table["players"]).max().fillna(0)
    names = sizes.sort_values(ascending=False, kind="stable").index[:MOST_INTERACTIONS]
    layers = sorted(int(each) for each in table["layer"].unique())
    groups = _by_replacement(table)
    rows = [
        [
            ours[ours["layer"] == each].set_index("players").reindex(names[::-1])
            for ours in groups.values()
        ]
        for each in layers
    ]
    figure = go.Figure(
        [
            _interaction_trace(some, each, panel).update(visible=each == layer)
            for each, panels in zip(layers, rows, strict=True)
            for panel, some in enumerate(panels)
        ]
    )
    _place_interactions(figure, list(groups), 30 + 22 * len(names))
    patches = [_interaction_range(panels) for panels in rows]
    add_slider(figure, len(layers), len(groups), layers.index(layer), patches=patches)
    first = dict(patches[layers.index(layer)])
    figure.layout.annotations[-1].visible = first.pop(f"annotations[{len(groups)}].visible")
    patch(figure, first)
    return figure


def _interaction_range(panels: Sequence[pd.DataFrame]) -> dict[str, object]:
    """Return the layout keys of one layer: its range, and a note where all is noise."""
    columns = ("share", *bound_columns("share"))
    ends = [np.concatenate([rows[name].to_numpy(float) for rows in panels]) for name in columns]
    limits, flat = axis_range(*ends), is_noise(*ends)
    ranged = {"xaxis.autorange": True} if limits is None else {"xaxis.range": list(limits)}
    return {**ranged, f"annotations[{len(panels)}].visible": flat}


def _place_interactions(figure: go.Figure, names: Sequence[str], height: int) -> None:
    wide = Grid(columns=len(names), panel=height, left=210, x_title=X_TITLE, shared_y=True)
    place(figure, "Interactions of players", names, wide, replace(wide, columns=1, left=175))
    note = {**inside(0), **FLAT_NOTE, "visible": False}
    figure.update_layout(showlegend=False, annotations=[*figure.layout.annotations, note])
    for at in (axis(panel) for panel in range(len(names))):
        same = ({"matches": "x"}, {"matches": "y"}) if at else ({}, {})
        ticks = {"zeroline": True, "zerolinewidth": 2, "nticks": 5, "tickangle": 0, **same[0]}
        labels = {"tickfont": {"size": 11}, **same[1]}
        figure.update_layout({f"xaxis{at}": ticks, f"yaxis{at}": labels})


def _interaction_trace(rows: pd.DataFrame, layer: int, panel: int) -> go.Scatter:
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
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        marker={"color": colour("interaction"), "symbol": symbol("interaction"), "size": 8},
        hovertemplate=(
            "%{y}<br>%{x:.3g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})"
            f"<extra>L{layer}</extra>"
        ),
    )


def _by_name(table: pd.DataFrame, by: str, column: str) -> list[Dots]:
    return [dots(rows, str(name), column) for name, rows in table.groupby(by, sort=False)]
