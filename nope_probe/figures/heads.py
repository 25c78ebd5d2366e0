"""A measure of every head -> a plotly heat map, heads across and layers down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.grid import Grid, place
from nope_probe.figures.style import BLANK, DIVERGING, SEQUENTIAL

MEASURES = {
    "amplitude": "amplitude, nats",
    "locality": "locality, -1 to 1",
    "relative_r2": "relative share",
    "edge_contrast": "edge contrast, nats",
}
CAPTIONS = {
    "amplitude": "How strong each head's pattern is: its RMS, with noise taken out.",
    "locality": "Red heads prefer near keys, blue ones far keys.",
    "relative_r2": "How much of each head's pattern depends on distance alone; blank: no pattern.",
    "edge_contrast": "First keys against the rest in each head's diagonal-normalised map.",
}
CELL = 26  # px


def head_map(table: pd.DataFrame, measure: str) -> go.Figure:
    """Draw one measure of each head; a head without it stays blank.

    Args:
        table: `heads.csv`: layer, head, and each measure with its bounds.
        measure: one of `MEASURES`.

    Raises:
        ValueError: for a measure that does not exist.
    """
    if measure not in MEASURES:
        raise ValueError(f"expected a measure of {', '.join(MEASURES)}, got {measure!r}")
    value, low, high = (
        table.pivot(index="layer", columns="head", values=name)
        for name in (measure, f"{measure}_low", f"{measure}_high")
    )
    heat = go.Heatmap(
        z=value.to_numpy(float),
        x=[int(head) for head in value.columns],
        y=[int(layer) for layer in value.index],
        customdata=np.stack([low.to_numpy(float), high.to_numpy(float)], -1),
        coloraxis="coloraxis",
        hoverongaps=False,
        hovertemplate=(
            "L%{y}H%{x}<br>%{z:.3g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})"
            f"<extra>{MEASURES[measure]}</extra>"
        ),
    )
    figure = go.Figure([heat])
    wide = Grid(
        columns=1,
        panel=max(160, CELL * len(value)),
        bottom=124,
        x_title="head",
        y_title="layer",
    )
    title = f"Each head's {MEASURES[measure]}"
    place(figure, title, [""], wide, replace(wide, left=50))
    figure.update_layout(plot_bgcolor=BLANK, coloraxis=_colours(value.to_numpy(float), measure))
    ticks = {"showgrid": False, "zeroline": False, "tickformat": "d"}
    figure.update_layout(
        xaxis={**ticks, "nticks": min(17, 1 + value.shape[1])},
        yaxis={**ticks, "autorange": "reversed", "nticks": min(33, 1 + len(value))},
    )
    return figure


def _colours(values: np.ndarray, measure: str) -> dict[str, object]:
    """Colour signed measures around zero, the others from zero on."""
    known = np.abs(values[np.isfinite(values)])
    top = 1.0 if measure in ("locality", "relative_r2") else float(known.max(initial=0.0)) or 1.0
    signed = measure in ("locality", "edge_contrast")
    bar = {"orientation": "h", "thickness": 10, "len": 300, "lenmode": "pixels", "nticks": 5}
    where = {"x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"}
    return {
        "colorscale": DIVERGING if signed else SEQUENTIAL,
        "cmin": -top if signed else 0.0,
        "cmax": top,
        "colorbar": {**bar, **where, "outlinewidth": 0, "title": {"text": ""}},
    }
