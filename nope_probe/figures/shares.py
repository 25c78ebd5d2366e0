"""Shares with their intervals -> plotly figures: sources, players, terms and interactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.components import TABLE, colour, symbol, words
from nope_probe.figures.dots import FLAT_NOTE, Dots, dots, note_flat, over_layers
from nope_probe.figures.grid import (
    Grid,
    add_slider,
    annotate,
    axis,
    inside,
    on,
    patch,
    place,
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
    ends = np.concatenate([estimates_of(rows, "share") for rows in panels], axis=1)
    limits, flat = axis_range(*ends), is_noise(*ends)
    ranged = {"xaxis.autorange": True} if limits is None else {"xaxis.range": list(limits)}
    return {**ranged, f"annotations[{len(panels)}].visible": flat}


def _place_interactions(figure: go.Figure, names: Sequence[str], height: int) -> None:
    wide = Grid(columns=len(names), panel=height, left=210, x_title=X_TITLE, shared_y=True)
    place(figure, "Interactions of players", names, wide, replace(wide, columns=1, left=175))
    annotate(figure, [{**inside(0), **FLAT_NOTE, "visible": False}])
    figure.update_layout(showlegend=False)
    for at in (axis(panel) for panel in range(len(names))):
        same = ({"matches": "x"}, {"matches": "y"}) if at else ({}, {})
        ticks = {"zeroline": True, "zerolinewidth": 2, "nticks": 5, "tickangle": 0, **same[0]}
        labels = {"tickfont": {"size": 11}, **same[1]}
        figure.update_layout({f"xaxis{at}": ticks, f"yaxis{at}": labels})


def _interaction_trace(rows: pd.DataFrame, layer: int, panel: int) -> go.Scatter:
    shares, lows, highs = estimates_of(rows, "share")
    empty = bool(np.isnan(shares).all())
    return go.Scatter(
        x=np.zeros_like(shares) if empty else shares,
        y=[words(str(name)) for name in rows.index],
        error_x=error_bars(shares, lows, highs),
        customdata=np.column_stack([lows, highs]),
        mode="text" if empty else "markers",
        text=NO_PATTERN,
        name=f"L{layer}",
        **on(panel),
        marker={"color": colour("interaction"), "symbol": symbol("interaction"), "size": 8},
        hovertemplate=(
            "%{y}<br>%{x:.3g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})"
            f"<extra>L{layer}</extra>"
        ),
    )


def _by_name(table: pd.DataFrame, by: str, column: str) -> list[Dots]:
    return [dots(rows, str(name), column) for name, rows in table.groupby(by, sort=False)]


MOST_COLUMNS = 4
LABELS = {"score": "scores", "all": "positional pattern"}


def band_amplitudes(table: pd.DataFrame) -> go.Figure:
    """Draw the RMS that each RoPE band has of the positional pattern, a panel per layer.

    Args:
        table: `bands.csv`: layer, band, the amplitude in nats with its bounds, and the share.
    """
    figure = go.Figure()
    layers = _layers_of(table)
    for panel, layer in enumerate(layers):
        figure.add_trace(_band_bars(table[table["layer"] == layer], panel))
    _place_layers(
        figure, layers, "The positional pattern by RoPE band", "wavelength, positions", 120, 50
    )
    zoom_together(figure, len(layers))
    _keep_flat(figure, table, "amplitude")
    return figure


def _band_bars(rows: pd.DataFrame, panel: int) -> go.Bar:
    ends = estimates_of(rows, "amplitude")
    return go.Bar(
        x=rows["band"].astype(str).tolist(),
        y=ends[0],
        error_y=error_bars(*ends),
        customdata=100 * rows["share"].to_numpy(float),
        marker={"color": TABLE["rope"].colour},
        showlegend=False,
        **on(panel),
        hovertemplate="%{x}: %{y:.3g} nats, share %{customdata:.1f}%<extra></extra>",
    )


def offset_profiles(table: pd.DataFrame) -> go.Figure:
    """Draw the mean of the scores or of each source's term at each distance, a panel per layer.

    Args:
        table: `offsets.csv`: layer, term, offset, and the mean in nats with its bounds.
    """
    figure = go.Figure()
    layers = _layers_of(table)
    for panel, layer in enumerate(layers):
        rows = table[table["layer"] == layer]
        for name in dict.fromkeys(rows["term"]):
            figure.add_traces(_profile(rows[rows["term"] == name], str(name), panel))
    _place_layers(figure, layers, "Mean by distance from query to key", "distance i - j", 84)
    # The level of the scores, which softmax ignores, differs between layers.
    zoom_together(figure, len(layers), also_y="score" not in set(table["term"]))
    return figure


def _profile(rows: pd.DataFrame, name: str, panel: int) -> list[go.Scatter]:
    """Return a line, and the band between its bounds."""
    x, shade = rows["offset"].to_numpy(int), colour("intact" if name in LABELS else name)
    label = LABELS.get(name, words(name))
    common = {"xaxis": f"x{axis(panel)}", "yaxis": f"y{axis(panel)}", "legendgroup": name}
    bounds = np.concatenate([rows["mean_low"].to_numpy(float), rows["mean_high"][::-1]])
    between = go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=bounds,
        fill="toself",
        mode="none",
        fillcolor=shade,
        opacity=0.2,
        hoverinfo="skip",
        showlegend=False,
        **common,
    )
    line = go.Scatter(
        x=x,
        y=rows["mean"].to_numpy(float),
        mode="lines",
        line={"color": shade, "width": 2, "dash": "dot" if name == "score" else "solid"},
        name=label,
        showlegend=panel == 0,
        hovertemplate=f"%{{x}}: %{{y:.3g}} nats<extra>{label}</extra>",
        **common,
    )
    return [between, line]


def _keep_flat(figure: go.Figure, table: pd.DataFrame, column: str) -> None:
    """Widen the panels' scale, and note those without a number above its noise."""
    if (limits := axis_range(*estimates_of(table, column))) is not None:
        figure.update_layout(yaxis={"range": limits})
    layers = enumerate(_layers_of(table))
    rows = {panel: table[table["layer"] == layer] for panel, layer in layers}
    flat = [panel for panel, each in rows.items() if is_noise(*estimates_of(each, column))]
    note_flat(figure, flat)


def _layers_of(table: pd.DataFrame) -> list[int]:
    return sorted({int(layer) for layer in table["layer"]})


def _place_layers(
    figure: go.Figure, layers: list[int], title: str, x_title: str, bottom: int, ticks: int = 0
) -> None:
    """Place a panel per layer; its x axis's tick labels may stand on end, `ticks` px high."""
    names = [f"L{layer}" for layer in layers]
    wide = Grid(
        columns=min(MOST_COLUMNS, len(layers)),
        panel=200,
        row_gap=90 + ticks,
        bottom=bottom,
        x_title=x_title,
        y_title="nats",
    )
    narrow = replace(wide, columns=1, panel=160, row_gap=80 + ticks, left=50)
    place(figure, title, names, wide, narrow)
