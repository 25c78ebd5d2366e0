"""Leads and patterns of heads without the sources, in nats -> figure."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.figures.names import row_name
from nope_probe.figures.style import (
    BLANK,
    GUIDE,
    PlotlyTrace,
    axis,
    colour_axis,
    draw_panels,
    padded_range,
    scatter,
)
from nope_probe.figures.words import QUESTIONS, with_readers
from nope_probe.removal import INTACT, SOURCES, Condition


def head_values(table: pd.DataFrame) -> go.Figure:
    """Draw each head's value without a source against its value in the intact model, nats.

    A panel for each source or band of RoPE, and for all sources together, of the lead and of what
    is kept of the pattern. On the diagonal nothing is lost; on the zero line all is lost.

    Args:
        table: `head_pattern.csv`: layer, head, removed, and lead and kept with their bounds, nats.
    """
    of_heads = with_readers(table).set_index("reader").groupby("removed", sort=False)
    heads = {str(removed): rows for removed, rows in of_heads}
    intact = heads.pop(INTACT.name)
    several = [name for name in heads if len(Condition.parse(name)) > 1]
    together = [name for name in several if Condition.parse(name) <= {*SOURCES}]
    shown = [*(name for name in heads if name not in several), *together[-1:]]
    panels, lines = dict[str, list[PlotlyTrace]](), list[tuple[float, float]]()
    for name, title in QUESTIONS.items():
        known = intact[intact[name].notna()]
        for condition in shown if len(known) else ():
            left = heads[condition].loc[known.index]
            panels[f"{title}, {row_name(condition, among=heads)}"] = [_points(name, known, left)]
            lines.append(padded_range([*known[name], *left[name]]) or (0.0, 1.0))
    figure = draw_panels(
        "Each head's value without a source",
        panels,
        columns=max(1, min(len(shown), 4)),
        panel=300,
        x_title="intact, nats",
        y_title="without it, nats",
        bottom=124,
    )
    for place, (low, high) in enumerate(lines):
        where = {"xref": f"x{axis(place)}", "yref": f"y{axis(place)}"}
        figure.add_shape(type="line", x0=low, x1=high, y0=low, y1=high, line=GUIDE, **where)
    figure.update_yaxes(zerolinewidth=2)
    limits = float(table["layer"].min()), max(1.0, float(table["layer"].max()))
    return figure.update_layout(coloraxis=colour_axis(limits, "layer"))


def _points(name: str, intact: pd.DataFrame, left: pd.DataFrame) -> PlotlyTrace:
    """Return the points of heads, and their intervals as hover texts."""
    texts = [
        [interval_text(interval_of(row, name), "z.2f", " nats") for row in rows.to_dict("records")]
        for rows in (intact, left)
    ]
    return scatter(
        "heads",
        "%{text}",
        x=intact[name],
        y=left[name],
        text=[
            f"{reader}<br>intact: {before}<br>without it: {after}"
            for reader, before, after in zip(intact.index, *texts, strict=True)
        ],
        mode="markers",
        marker={
            "color": intact["layer"].tolist(),
            "coloraxis": "coloraxis",
            "size": 8,
            "line": {"width": 0.5, "color": BLANK},
            "opacity": 0.85,
        },
        showlegend=False,
    )
