"""Shares of sources, players, exact terms and interactions in the pattern -> plotly figures."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import (
    LEGEND_ROW,
    MOST_TICKS,
    NOTE,
    PERCENT,
    Dots,
    interval_dots,
    mark_empty_layers,
    marker,
    over_layers,
)
from nope_probe.figures.intervals import (
    NO_PATTERN,
    axis_range,
    estimates_of,
    excludes_zero,
)
from nope_probe.figures.names import colour, symbol, words
from nope_probe.figures.style import Grid, add_slider, patch, place, set_axes, tinted

X_TITLE = "share of the pattern"
# The part of a share in each column, and how opaque its tone is.
BAR_PARTS = {"share_first": ("first key", 1.0), "share_others": ("other keys", 0.45)}
PLAYER_PARTS = {"lost": "lost without it", "share": "Shapley share"}
FILLINGS = ("", "-open", "-dot", "-open-dot")  # of the markers of several replacements
MOST_INTERACTIONS = 12  # of a layer


def source_shares(table: pd.DataFrame) -> go.Figure:
    """Draw each source's share of the pattern, per layer.

    Where a first key stands apart, a layer has one bar, in which a source has two tones: its part
    at the first key and its part among the other keys. Elsewhere sources are dots with intervals,
    beside their RMS in nats.

    Args:
        table: `sources.csv`: layer, term, rms (nats) and share, each with its bounds; the term
            `position`, the sum of all terms but content, is not drawn.
    """
    terms = table[table["term"] != "position"]
    title = "The sources of the positional pattern, per layer"
    if "share_first" in terms and terms["share_first"].fillna(0).any():
        return _share_bars(terms, title)
    panels = {
        "share of the pattern": _by_name(terms, "term", "share"),
        "RMS, nats": _by_name(terms, "term", "rms"),
    }
    return over_layers(panels, title=title)


def _share_bars(terms: pd.DataFrame, title: str) -> go.Figure:
    """Draw a bar per layer; parts against the pattern hang below zero."""
    layers = sorted(terms["layer"].astype(int).unique().tolist())
    names = list(dict.fromkeys(terms["term"]))
    traces = []
    for (column, (where, tone)), name in product(BAR_PARTS.items(), names):
        rows = terms[terms["term"] == name].set_index("layer").reindex(layers).reset_index()
        values, lows, highs = estimates_of(rows, column)
        label = f"{words(name)}, {where}"
        traces.append(
            {
                "type": "bar",
                "name": label,
                "x": layers,
                "y": values,
                "customdata": np.stack([lows, highs], -1),
                "hovertemplate": "L%{x}: %{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})"
                f"<extra>{label}</extra>",
                "marker": {"color": tinted(colour(name), tone), "line": {"width": 0}},
            }
        )
    wide = Grid(
        columns=1, panel=300, x_title="layer", bottom=60 + LEGEND_ROW * -(-len(traces) // 4)
    )
    below = 60 + 20 * len(traces)  # a phone shows one name in a row
    layout = place(title, [X_TITLE], wide, panel=240, left=44, bottom=below)
    deep = len(layers) > MOST_TICKS
    layout |= {"barmode": "relative", "bargap": 0.15 if deep else 0.5}
    ticks = -(-len(layers) // MOST_TICKS)
    set_axes(layout, "x", showgrid=False, zeroline=False, tick0=0, dtick=ticks)
    set_axes(layout, "y", tickformat=".0%", zerolinewidth=2, nticks=6)
    mark_empty_layers(layout, {X_TITLE: _by_name(terms, "term", "share")})
    return go.Figure(traces, layout)


def player_shares(table: pd.DataFrame) -> go.Figure:
    """Draw what is lost without each player, and each player's Shapley share, on one scale.

    The markers of a weight tell its replacements apart: the first has full markers.

    Args:
        table: the rows of `players.csv` of one player set. A replacement without shares shows only
            losses.
    """
    groups = _by_replacement(table)
    panels = {
        title: [
            dots
            for player in dict.fromkeys(table["player"])
            for dots in _of_player(table[table["player"] == player], column, [*groups])
        ]
        for column, title in PLAYER_PARTS.items()
        if column == "lost" or table[column].notna().any()
    }
    title = "The players' parts in the positional pattern, per layer"
    return over_layers(panels, title, columns=1, same_y=[range(len(panels))])


def _of_player(rows: pd.DataFrame, column: str, replacements: list[str]) -> list[Dots]:
    """Return a series per replacement of a player, without undefined series, perhaps all."""
    groups, series = _by_replacement(rows), []
    for name, of_replacement in groups.items():
        player = str(rows["player"].iloc[0])
        filling = FILLINGS[replacements.index(name) % len(FILLINGS)] if name else ""
        label = f"{words(player)}, {name}" if name else ""
        dots = Dots(
            of_replacement, player, column, label, marker={"symbol": symbol(player) + filling}
        )
        if column == "lost" or of_replacement[column].notna().any():
            series.append(dots)
    return series


def _by_replacement(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each replacement by name; a single replacement has an empty name."""
    if "replacement" not in table or table["replacement"].nunique() < 2:
        return {"": table}
    return {str(name): rows for name, rows in table.groupby("replacement", sort=False)}


def mean_covariance_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the exact terms' shares and RMS, per layer.

    Args:
        table: `mean_covariance.csv`: layer, term, and share and rms (nats), each with its bounds.
    """
    terms = table.assign(term=table["term"].map(term_entry))
    panels = {
        "share of the pattern": _by_name(terms, "term", "share"),
        "RMS, nats": _by_name(terms, "term", "rms"),
    }
    return over_layers(panels, title="The exact terms of the scores")


def term_entry(term: str) -> str:
    """Return the name of a term of `mean_covariance.csv` in the table of components."""
    return f"{term}_term" if term in ("mean", "covariance") else term


def interactions(table: pd.DataFrame, layer: int = 0) -> go.Figure:
    """Draw the shares that players add only together, with a layer slider.

    A layer shows the largest of the interactions whose intervals exclude 0, and counts the others.

    Args:
        table: the rows of `interactions.csv` of one player set; `players` are joined by `+`. Every
            value of the column `replacement` has a panel, on a common scale.
        layer: the layer that the slider shows first.
    """
    layers = sorted(int(number) for number in table["layer"].unique())
    groups = _by_replacement(table)
    tables = {number: table[table["layer"] == number] for number in layers}
    clear = {number: _clear_interactions(rows) for number, rows in tables.items()}
    most = max(len(names) for names, _ in clear.values())
    traces, patches = [], []
    for number, (names, note) in clear.items():
        shares = [
            estimates_of(rows[rows["layer"] == number].set_index("players").reindex(names), "share")
            for rows in groups.values()
        ]
        traces += [
            interval_dots(
                [words(name) for name in names],
                estimates,
                panel,
                label=f"L{number}",
                hover=f"%{{y}}<br>%{{x:.1%}} {PERCENT}",
                marker=marker("interaction", 8),
                sideways=True,
                visible=number == layer,
            )
            for panel, estimates in enumerate(shares)
        ]
        limits = axis_range(*estimates_of(tables[number], "share"))
        ranged = {"xaxis.autorange": True} if limits is None else {"xaxis.range": list(limits)}
        top = len(names) - 0.5
        rows = {"yaxis.range": [top - most - 1, top]}
        patches.append({**ranged, **rows, f"annotations[{len(groups)}].text": note})
    wide = Grid(
        columns=len(groups),
        panel=30 + 22 * (1 + most),
        left=210,
        x_title=X_TITLE,
        shared_y=True,
    )
    layout = place("Interactions of players", list(groups), wide, "xy", columns=1, left=175)
    below = {"x": 1, "xref": "x domain", "xanchor": "right", "y": -1, "yref": "y"}
    layout["annotations"].append({**NOTE, **below})
    set_axes(layout, "x", tickformat=".0%", zeroline=True, zerolinewidth=2, nticks=5, tickangle=0)
    set_axes(layout, "y", tickfont={"size": 11}, type="category")
    first = layers.index(layer)
    add_slider(layout, layers, len(groups), first, patches=patches)
    patch(layout, patches[first])
    return go.Figure(traces, {**layout, "showlegend": False})


def _clear_interactions(rows: pd.DataFrame) -> tuple[list[str], str]:
    """Return a layer's interactions to draw, the largest last, and how many others there are."""
    clear = rows[excludes_zero(rows, "share")]
    sizes = clear["share"].abs().groupby(clear["players"]).max().sort_values(kind="stable")
    n_noise = rows["players"].nunique() - len(sizes)
    n_small = max(0, len(sizes) - MOST_INTERACTIONS)
    if rows["share"].isna().all():
        return [], NO_PATTERN
    others = [f"{n_small} smaller"] * (n_small > 0) + [f"{n_noise} within noise"] * (n_noise > 0)
    others[:1] = [text.replace(" ", " others " if len(sizes) else " ", 1) for text in others[:1]]
    return [*sizes.index[-MOST_INTERACTIONS:]], ", ".join(others)


def _by_name(table: pd.DataFrame, by: str, column: str) -> list[Dots]:
    return [Dots(rows, str(name), column) for name, rows in table.groupby(by, sort=False)]
