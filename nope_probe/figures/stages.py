"""Measures of each stage -> a plotly figure, the ablated model beside the intact one."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go

from nope_probe.components import INK, LETTERS, colour, words
from nope_probe.figures.grid import Grid, axis, place
from nope_probe.figures.intervals import bound_columns, error_bars
from nope_probe.figures.style import ZERO
from nope_probe.figures.words import MEASURES

STAGE_MEASURES = ("locality", "monotonicity")


def stage_measures(table: pd.DataFrame, removed: tuple[str, ...] = ()) -> go.Figure:
    """Draw locality and monotonicity of each stage's map, with 95% intervals.

    Args:
        table: `stages.csv`: model (intact or ablated), stage, and the measures with their bounds.
        removed: the components that the ablation removed; the first fixes the colour.
    """
    figure = go.Figure()
    for panel, measure in enumerate(STAGE_MEASURES):
        for model, rows in table.groupby("model", sort=False):
            ablated = model == "ablated"
            label = f"without {' + '.join(map(words, removed))}" if ablated else "intact model"
            ink = colour(removed[0]) if ablated and removed else INK
            figure.add_trace(_dots(rows, measure, panel, label, ink, ablated))
        _add_neutral_line(figure, panel, MEASURES[measure].neutral)
    wide = Grid(columns=2, panel=240, gap=0.08, x_title="stage")
    titles = [MEASURES[measure].title for measure in STAGE_MEASURES]
    place(
        figure,
        "Measures of each stage's positional pattern",
        titles,
        wide,
        replace(wide, columns=1, panel=200, left=44),
    )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(LETTERS))
    figure.update_layout(xaxis2={"matches": "x"})
    figure.update_layout(yaxis={"range": [-1.08, 1.08]}, yaxis2={"range": [-0.04, 1.04]})
    return figure


def _add_neutral_line(figure: go.Figure, panel: int, neutral: float) -> None:
    at = axis(panel)
    line = {"type": "line", "x0": 0, "x1": 1, "y0": neutral, "y1": neutral}
    where = {"xref": f"x{at} domain", "yref": f"y{at}"}
    figure.add_shape({**line, **where, "line": {"color": ZERO, "width": 1, "dash": "dot"}})


def _dots(
    rows: pd.DataFrame, measure: str, panel: int, label: str, ink: str, hollow: bool
) -> go.Scatter:
    columns = (measure, *bound_columns(measure))
    values, lows, highs = (rows[name].to_numpy(float) for name in columns)
    return go.Scatter(
        x=rows["stage"].tolist(),
        y=values,
        error_y=error_bars(values, lows, highs),
        mode="lines+markers",
        line={"color": ink, "width": 1, "dash": "dot" if hollow else "solid"},
        marker={"color": ink, "size": 9, "symbol": "circle-open" if hollow else "circle"},
        xaxis=f"x{axis(panel)}",
        yaxis=f"y{axis(panel)}",
        name=label,
        legendgroup=label,
        showlegend=panel == 0,
        hovertemplate=f"(%{{x}}): %{{y:.2f}}<extra>{label}</extra>",
    )
