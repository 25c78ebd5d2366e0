"""What each stage's pattern is like -> a plotly figure: where it leans to near keys.

The stages stand in the order of the data's flow, the ablated model beside the intact one.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.circuit_layout import LETTERS
from nope_probe.figures.grid import Grid, axis, place
from nope_probe.figures.style import INK, ZERO, colour, words

MEASURES = {
    "locality": ("does it prefer near keys? rank correlation", 0.0),
    "monotonicity": ("how often the nearer of two keys has more", 0.5),
}


def stage_measures(table: pd.DataFrame, removed: tuple[str, ...] = ()) -> go.Figure:
    """Draw locality and monotonicity of each stage's map, with 95% intervals.

    Args:
        table: `stages.csv`: model (intact or ablated), stage, and the measures with their bounds.
        removed: what the ablation took away; its first component gives the colour.
    """
    figure = go.Figure()
    for panel, (measure, (_, neutral)) in enumerate(MEASURES.items()):
        for model, rows in table.groupby("model", sort=False):
            ablated = model == "ablated"
            label = f"without {' + '.join(map(words, removed))}" if ablated else "intact model"
            ink = colour(removed[0]) if ablated and removed else INK
            figure.add_trace(_dots(rows, measure, panel, label, ink, ablated))
        at = axis(panel)
        line = {"type": "line", "x0": 0, "x1": 1, "y0": neutral, "y1": neutral}
        where = {"xref": f"x{at} domain", "yref": f"y{at}"}
        figure.add_shape({**line, **where, "line": {"color": ZERO, "width": 1, "dash": "dot"}})
    wide = Grid(columns=2, panel=240, gap=0.08, x_title="stage")
    titles = [title for title, _ in MEASURES.values()]
    title = "Which way each stage's pattern leans"
    place(figure, title, titles, wide, replace(wide, columns=1, panel=200, left=44))
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(LETTERS))
    figure.update_layout(yaxis={"range": [-1.08, 1.08]}, yaxis2={"range": [-0.04, 1.04]})
    return figure


def _dots(
    rows: pd.DataFrame, measure: str, panel: int, label: str, ink: str, hollow: bool
) -> go.Scatter:
    value = rows[measure].astype(float)
    low, high = (rows[f"{measure}_{end}"].astype(float) for end in ("low", "high"))
    bars = {"array": (high - value).tolist(), "arrayminus": (value - low).tolist()}
    return go.Scatter(
        x=rows["stage"].tolist(),
        y=value.tolist(),
        error_y={"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, **bars},
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
