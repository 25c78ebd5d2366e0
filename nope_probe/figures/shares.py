"""Shares with their intervals -> plotly figures: sources, players, terms and interactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.components import INK, TABLE, colour, words
from nope_probe.figures.dots import (
    BOUNDS,
    FLAT_NOTE,
    Dots,
    curve_in_band,
    interval_dots,
    marker,
    named,
    note_flat,
    over_layers,
)
from nope_probe.figures.grid import (
    Grid,
    Layout,
    Trace,
    add_slider,
    inside,
    on,
    patch,
    place,
    set_axes,
    zoom_together,
)
from nope_probe.figures.intervals import (
    NO_PATTERN,
    axis_range,
    error_bars,
    estimates_of,
    is_noise,
)

MOST_INTERACTIONS = 24
X_TITLE = "share of the pattern"
DASHES = ("dot", "dash", "dashdot", "longdash")
LOSSES = ("lost", "amplification")  # some replacements have only these columns
PLAYER_PARTS = {
    "lost": "lost without it",
    "amplification": "amplification",
    "share": "Shapley share",
    "alone": "there alone",
}


def source_shares(table: pd.DataFrame) -> go.Figure:
    """Draw each source's share of the pattern, per layer, and its RMS in nats.

    Args:
        table: `sources.csv`: layer, term, rms (nats) and share, each with its bounds; the term
            `position`, the sum of all terms but content, is not drawn.
    """
    terms = table[table["term"] != "position"]
    panels = {
        "share of the pattern": _by_name(terms, "term", "share"),
        "RMS, nats": _by_name(terms, "term", "rms"),
    }
    return over_layers(panels, title="The sources of the positional pattern, per layer")


def player_shares(table: pd.DataFrame) -> go.Figure:
    """Draw each player's share, the loss without it, its part alone, and its amplification.

    Args:
        table: the rows of `players.csv` of one player set. Every value of the column `replacement`
            has a row of panels, on the scales of the first row. A replacement without shares shows
            only losses.
    """
    groups = _by_replacement(table)
    columns = [column for column in PLAYER_PARTS if column == "lost" or table[column].notna().any()]
    panels = {
        (f"{name}: " if name else "") + PLAYER_PARTS[column]: _players(rows, column)
        for name, rows in groups.items()
        for column in columns
        if column in LOSSES or rows["share"].notna().any()
    }
    return over_layers(
        panels,
        title="The players' parts in the positional pattern, per layer",
        columns=len(columns) if len(groups) > 1 else None,
        unmarked=[t for t in panels if t.endswith((PLAYER_PARTS["alone"], "amplification"))],
        same_y=[range(place, len(panels), len(columns)) for place in range(len(columns))],
    )


def _players(rows: pd.DataFrame, column: str) -> list[Dots]:
    """Return a part of the players, without players whose part is undefined, perhaps all."""
    series = _by_name(rows, "player", column)
    known = [dots for dots in series if not np.isnan(dots.estimates[0]).all()]
    return known or series


def _by_replacement(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each replacement by name; a single replacement has an empty name."""
    if "replacement" not in table or table["replacement"].nunique() < 2:
        return {"": table}
    return {str(name): rows for name, rows in table.groupby("replacement", sort=False)}


def mean_covariance_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the exact terms' shares and RMS, per layer, and the dimensions of the mean keys.

    Args:
        table: `mean_covariance.csv`: layer, term, and share, rms (nats) and dimensions, each with
            its bounds.
    """
    named = table.assign(term=table["term"].map(term_entry))
    panels = {
        "share of the pattern": _by_name(named, "term", "share"),
        "RMS, nats": _by_name(named, "term", "rms"),
        "dimensions of the mean keys": _by_name(
            named[named["term"] == "mean_term"], "term", "dimensions"
        ),
    }
    return over_layers(panels, title="The exact terms of the scores")


def term_entry(term: str) -> str:
    """Return the name of a term of `mean_covariance.csv` in the table of components."""
    return f"{term}_term" if term in ("mean", "covariance") else term


def interactions(table: pd.DataFrame, layer: int = 0) -> go.Figure:
    """Draw the shares that players add only together, with a layer slider.

    If there are many, only the interactions with the largest shares in any layer are drawn.

    Args:
        table: the rows of `interactions.csv` of one player set; `players` are joined by `+`. Every
            value of the column `replacement` has a panel, on a common scale.
        layer: the layer that the slider shows first.
    """
    sizes = table["share"].abs().groupby(table["players"]).max().fillna(0)
    names = sizes.sort_values(ascending=False, kind="stable").index[:MOST_INTERACTIONS][::-1]
    layers = sorted(int(number) for number in table["layer"].unique())
    groups = _by_replacement(table)
    traces, patches = [], []
    for number in layers:
        shares = [
            estimates_of(rows[rows["layer"] == number].set_index("players").reindex(names), "share")
            for rows in groups.values()
        ]
        for panel, estimates in enumerate(shares):
            trace = _interaction_dots([words(name) for name in names], estimates, number, panel)
            traces.append({**trace, "visible": number == layer})
        ends = np.concatenate(shares, axis=1)
        limits = axis_range(*ends)
        ranged = {"xaxis.autorange": True} if limits is None else {"xaxis.range": list(limits)}
        patches.append({**ranged, f"annotations[{len(groups)}].visible": is_noise(*ends)})
    wide = Grid(
        columns=len(groups),
        panel=30 + 22 * len(names),
        left=210,
        x_title=X_TITLE,
        shared_y=True,
    )
    layout = place("Interactions of players", list(groups), wide, columns=1, left=175)
    layout["annotations"].append({**inside(0), **FLAT_NOTE})
    set_axes(layout, "x", zeroline=True, zerolinewidth=2, nticks=5, tickangle=0)
    set_axes(layout, "y", tickfont={"size": 11})
    zoom_together(layout)
    first = layers.index(layer)
    add_slider(layout, layers, len(groups), first, patches=patches)
    patch(layout, patches[first])
    return go.Figure(traces, {**layout, "showlegend": False})


def _interaction_dots(
    names: Sequence[str], shares: Float[np.ndarray, "3 name"], layer: int, panel: int
) -> Trace:
    """Return a layer's shares; if all are undefined, return words that say so."""
    drawn: dict[str, object] = {}
    if np.isnan(shares).all():
        drawn = {"x": np.zeros(len(names)), "mode": "text", "text": NO_PATTERN}
    return interval_dots(
        names,
        shares,
        panel,
        label=f"L{layer}",
        hover=f"%{{y}}<br>%{{x:.3g}} {BOUNDS}",
        marker=marker("interaction", 8),
        sideways=True,
        **drawn,
    )


def _by_name(table: pd.DataFrame, by: str, column: str) -> list[Dots]:
    return [Dots(rows, str(name), column) for name, rows in table.groupby(by, sort=False)]


MOST_COLUMNS = 4
LABELS = {"score": "scores", "all": "positional pattern"}


def band_amplitudes(table: pd.DataFrame) -> go.Figure:
    """Draw the RMS of each RoPE band's part of the positional pattern, a panel per layer.

    Args:
        table: `bands.csv`: layer, band, the amplitude in nats with its bounds, and the share.
    """
    traces, flat = [], []
    for panel, (_, rows) in enumerate(table.groupby("layer")):
        ends = estimates_of(rows, "amplitude")
        trace = {
            "type": "bar",
            "x": rows["band"].astype(str).tolist(),
            "y": ends[0],
            "error_y": error_bars(*ends),
            "customdata": 100 * rows["share"].to_numpy(float),
            "marker": {"color": TABLE["rope"].colour},
            "showlegend": False,
            **on(panel),
            "hovertemplate": "%{x}: %{y:.3g} nats, share %{customdata:.1f}%<extra></extra>",
        }
        traces.append(trace)
        if is_noise(*ends):
            flat.append(panel)
    title, x_title = "The positional pattern by RoPE band", "wavelength, positions"
    layout = _place_layers(table, title, x_title, bottom=120, ticks=50)
    zoom_together(layout, "y")
    if (limits := axis_range(*estimates_of(table, "amplitude"))) is not None:
        layout["yaxis"]["range"] = limits
    note_flat(layout, flat)
    return go.Figure(traces, layout)


def offset_profiles(table: pd.DataFrame) -> go.Figure:
    """Draw the mean of the scores, or of each source's term, by distance, a panel per layer.

    Args:
        table: `offsets.csv`: layer, term, offset, and the mean in nats with its bounds.
    """
    traces: list[Trace] = []
    for panel, (_, of_layer) in enumerate(table.groupby("layer")):
        for name, rows in of_layer.groupby("term", sort=False):
            ink = colour("intact" if name in LABELS else str(name))
            traces += curve_in_band(
                _middles(rows, "offset"),
                estimates_of(rows, "mean"),
                panel,
                label=LABELS.get(str(name), words(str(name))),
                hover="%{x}: %{y:.3g} nats",
                line={"color": ink, "width": 2, "dash": "dot" if name == "score" else "solid"},
            )
    title = "Mean by distance from query to key"
    layout = _place_layers(table, title, "distance i - j", bottom=84)
    if "last_offset" in table:  # bins that grow with distance
        set_axes(layout, "x", type="log")
    if "score" not in set(table["term"]):  # softmax ignores the scores' level, which differs
        zoom_together(layout, "y")
    return go.Figure(traces, layout)


def query_strengths(table: pd.DataFrame, lengths: Mapping[str, int]) -> go.Figure:
    """Draw the RMS of the pattern at each query's position, a panel per layer.

    Args:
        table: `queries.csv`: layer, the first and last query of a group, and rms (nats) with its
            bounds.
        lengths: the model's stated lengths, such as its context, in tokens; lines mark lengths that
            queries reach.
    """
    traces: list[Trace] = []
    reached = int(table["last_query"].max())
    for panel, (_, rows) in enumerate(table.groupby("layer")):
        traces += curve_in_band(
            _middles(rows, "query"),
            estimates_of(rows, "rms"),
            panel,
            label="pattern",
            hover="query %{x:.0f}: %{y:.3g} nats",
            line={"color": colour("intact"), "width": 2},
        )
        top = float(rows["rms_high"].max())
        reachable = {name: length for name, length in lengths.items() if length <= reached}
        for (name, length), dash in zip(reachable.items(), cycle(DASHES), strict=False):
            about = named(panel, f"{name} ({length:,})", "")
            ends = {"x": [length, length], "y": [0.0, top]}
            line = {"color": INK, "width": 1, "dash": dash}
            traces.append({"type": "scatter", **ends, "mode": "lines", "line": line, **about})
    title = "The strength of the positional pattern by query"
    return go.Figure(traces, _place_layers(table, title, "query position", bottom=84))


def _middles(rows: pd.DataFrame, name: str) -> np.ndarray:
    """Return the middle of each row's distances or queries."""
    last = f"last_{name}"
    first = rows[name].to_numpy(int)
    return (first + rows[last].to_numpy(int)) / 2 if last in rows else first


def _place_layers(
    table: pd.DataFrame, title: str, x_title: str, bottom: int, ticks: int = 0
) -> Layout:
    """Place a panel per layer; tick labels of x may stand on end, `ticks` px high."""
    names = [f"L{layer}" for layer in sorted({*table["layer"]})]
    wide = Grid(
        columns=min(MOST_COLUMNS, len(names)),
        panel=200,
        row_gap=90 + ticks,
        bottom=bottom,
        x_title=x_title,
        y_title="nats",
    )
    layout = place(title, names, wide, columns=1, panel=160, row_gap=80 + ticks, left=50)
    zoom_together(layout, "x")
    return layout
