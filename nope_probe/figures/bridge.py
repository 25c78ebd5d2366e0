"""The positional pattern against behaviour -> plotly figures, over conditions and over heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from nope_probe.components import colour, symbol
from nope_probe.figures.behaviour import component, label
from nope_probe.figures.grid import Grid, axis, place, zoom_together
from nope_probe.figures.intervals import bound_columns, error_bars
from nope_probe.figures.style import SEQUENTIAL


def pattern_and_behaviour(table: pd.DataFrame, effects: Mapping[str, str]) -> go.Figure:
    """Draw what each condition takes from the positional pattern against what behaviour loses.

    Args:
        table: `bridge.csv`: condition, layer, pattern (nats), and each effect with its bounds; the
            pattern is summed over layers, and a layer's own effect averaged.
        effects: the titles of the y axes by the effect's column.
    """
    groups = table.groupby("condition", sort=False)
    lost = groups["pattern"].sum(min_count=1)
    figure = go.Figure()
    for panel, effect in enumerate(effects):
        means = groups[[effect, *bound_columns(effect)]].mean()
        for condition in lost.index:
            figure.add_trace(
                _bridge_dot(condition, float(lost[condition]), means.loc[condition], panel)
            )
    wide = Grid(
        columns=len(effects), panel=280, x_title="pattern lost, nats, sum over layers", bottom=110
    )
    narrow = replace(wide, columns=1, panel=220, left=50, bottom=170)
    heading = "What a removal takes from the positional pattern, and from behaviour"
    place(figure, heading, list(effects.values()), wide, narrow)
    zoom_together(figure, len(effects), also_y=False)
    return figure


def _bridge_dot(condition: str, lost: float, effect: pd.Series, panel: int) -> go.Scatter:
    value, low, high = (np.array([each], float) for each in effect.to_numpy(float))
    return go.Scatter(
        x=[lost],
        y=value,
        error_y=error_bars(value, low, high),
        mode="markers",
        marker={
            "color": colour(component(condition)),
            "symbol": symbol(component(condition)),
            "size": 10,
        },
        name=label(condition),
        legendgroup=condition,
        showlegend=panel == 0,
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        hovertemplate=f"pattern %{{x:.3g}} nats, %{{y:.3g}}<extra>{label(condition)}</extra>",
    )


def heads_and_behaviour(table: pd.DataFrame) -> go.Figure:
    """Draw what is lost without each head's W_Q against the head's own positional pattern.

    Args:
        table: `heads.csv`: layer, head, pattern (nats), and loss with its bounds, nats.
    """
    layers = sorted(set(table["layer"]))
    colours = sample_colorscale(SEQUENTIAL, list(np.linspace(0.05, 0.85, max(2, len(layers)))))
    figure = go.Figure()
    for index, layer in enumerate(layers):
        rows = table[table["layer"] == layer]
        values, low, high = (
            rows[each].to_numpy(float) for each in ("loss", *bound_columns("loss"))
        )
        figure.add_scatter(
            x=rows["pattern"].to_numpy(float),
            y=values,
            error_y=error_bars(values, low, high),
            text=[f"L{layer}H{head}" for head in rows["head"]],
            mode="markers+text",
            textposition="top right",
            marker={"color": colours[index], "size": 9},
            name=f"L{layer}",
            hovertemplate="%{text}: pattern %{x:.3g} nats, loss %{y:+.3g} nats<extra></extra>",
        )
    wide = Grid(
        columns=1,
        panel=320,
        left=70,
        x_title="the head's positional pattern, nats",
        y_title="rise of the loss without its W_Q, nats",
    )
    place(figure, "Heads: pattern and behaviour", [""], wide, replace(wide, panel=240, left=50))
    return figure
