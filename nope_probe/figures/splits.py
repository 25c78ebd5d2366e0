"""Exact splits of the score map -> plotly figures: RoPE bands, and profiles over distance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.components import TABLE, colour, words
from nope_probe.figures.dots import FLAT_NOTE
from nope_probe.figures.grid import Grid, axis, inside, place, zoom_together
from nope_probe.figures.intervals import bound_columns, error_bars
from nope_probe.figures.noise import axis_range, is_noise

COLUMNS = 4
LABELS = {"score": "scores", "all": "positional pattern"}


def band_amplitudes(table: pd.DataFrame) -> go.Figure:
    """Draw the RMS that each RoPE band has of the positional pattern, a panel per layer.

    Args:
        table: `bands.csv`: layer, band, the amplitude in nats with its bounds, and the share.
    """
    figure = go.Figure()
    layers = _layers(table)
    for panel, layer in enumerate(layers):
        figure.add_trace(_bars(table[table["layer"] == layer], panel))
    _place(figure, layers, "The positional pattern by RoPE band", "wavelength, positions", 120, 50)
    zoom_together(figure, len(layers))
    _keep_flat(figure, table, "amplitude")
    return figure


def _bars(rows: pd.DataFrame, panel: int) -> go.Bar:
    values, lows, highs = (rows[f"amplitude{end}"].to_numpy(float) for end in ("", "_low", "_high"))
    return go.Bar(
        x=rows["band"].astype(str).tolist(),
        y=values,
        error_y=error_bars(values, lows, highs),
        customdata=100 * rows["share"].to_numpy(float),
        marker={"color": TABLE["rope"].colour},
        showlegend=False,
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        hovertemplate="%{x}: %{y:.3g} nats, share %{customdata:.1f}%<extra></extra>",
    )


def offset_profiles(table: pd.DataFrame) -> go.Figure:
    """Draw the mean of the scores or of each source's term at each distance, a panel per layer.

    Args:
        table: `offsets.csv`: layer, term, offset, and the mean in nats with its bounds.
    """
    figure = go.Figure()
    layers = _layers(table)
    for panel, layer in enumerate(layers):
        rows = table[table["layer"] == layer]
        for name in dict.fromkeys(rows["term"]):
            figure.add_traces(_line(rows[rows["term"] == name], str(name), panel))
    _place(figure, layers, "Mean by distance from query to key", "distance i - j", 84)
    # The level of the scores, which softmax ignores, differs between layers.
    zoom_together(figure, len(layers), also_y="score" not in set(table["term"]))
    return figure


def _line(rows: pd.DataFrame, name: str, panel: int) -> list[go.Scatter]:
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
    columns = (column, *bound_columns(column))
    if (limits := axis_range(*(table[each].to_numpy(float) for each in columns))) is not None:
        figure.update_layout(yaxis={"range": limits})
    notes = [
        {**inside(panel), **FLAT_NOTE}
        for panel, layer in enumerate(_layers(table))
        if is_noise(*(table.loc[table["layer"] == layer, each].to_numpy(float) for each in columns))
    ]
    figure.update_layout(annotations=[*figure.layout.annotations, *notes])


def _layers(table: pd.DataFrame) -> list[int]:
    return sorted({int(layer) for layer in table["layer"]})


def _place(
    figure: go.Figure, layers: list[int], title: str, x_title: str, bottom: int, ticks: int = 0
) -> None:
    """Place a panel per layer; its x axis's tick labels may stand on end, `ticks` px high."""
    names = [f"L{layer}" for layer in layers]
    wide = Grid(
        columns=min(COLUMNS, len(layers)),
        panel=200,
        row_gap=90 + ticks,
        bottom=bottom,
        x_title=x_title,
        y_title="nats",
    )
    narrow = replace(wide, columns=1, panel=160, row_gap=80 + ticks, left=50)
    place(figure, title, names, wide, narrow)
