"""One measure of every head -> a plotly heat map, heads across and layers down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.grid import Grid, place
from nope_probe.figures.intervals import bound_columns
from nope_probe.figures.noise import FLOOR
from nope_probe.figures.style import BLANK, DIVERGING, SEQUENTIAL, colour_bar
from nope_probe.figures.words import ATTENTION, MEASURES

HEAD_MEASURES = ("amplitude", "locality", "relative_r2", "edge_contrast")
ABOUT = {**{name: MEASURES[name] for name in HEAD_MEASURES}, **ATTENTION}
CELL = 26  # px


def head_map(table: pd.DataFrame, measure: str) -> go.Figure:
    """Draw one measure of each head; a head without it stays blank.

    Args:
        table: `heads.csv`: layer, head, and each measure with its bounds.
        measure: one of `ABOUT`.

    Raises:
        ValueError: for a measure that does not exist.
    """
    if measure not in ABOUT:
        raise ValueError(f"expected a measure of {', '.join(ABOUT)}, got {measure!r}")
    values, *bounds = (
        table.pivot(index="layer", columns="head", values=name)
        for name in (measure, *bound_columns(measure))
    )
    figure = go.Figure([_heat(values, bounds, ABOUT[measure].title)])
    _place(figure, values, f"Each head's {ABOUT[measure].title}")
    figure.update_layout(coloraxis=_colours(values.to_numpy(float), measure))
    return figure


def _heat(values: pd.DataFrame, bounds: list[pd.DataFrame], title: str) -> go.Heatmap:
    return go.Heatmap(
        z=values.to_numpy(float),
        x=[int(head) for head in values.columns],
        y=[int(layer) for layer in values.index],
        customdata=np.stack([each.to_numpy(float) for each in bounds], -1),
        coloraxis="coloraxis",
        hoverongaps=False,
        hovertemplate=(
            "L%{y}H%{x}<br>%{z:.3g} (%{customdata[0]:.3g} to %{customdata[1]:.3g})"
            f"<extra>{title}</extra>"
        ),
    )


def _place(figure: go.Figure, values: pd.DataFrame, title: str) -> None:
    n_layers, n_heads = values.shape
    panel = max(160, CELL * n_layers)
    wide = Grid(columns=1, panel=panel, bottom=124, x_title="head", y_title="layer")
    place(figure, title, [""], wide, replace(wide, left=50))
    ticks = {"showgrid": False, "zeroline": False, "tickformat": "d"}
    figure.update_layout(
        plot_bgcolor=BLANK,
        xaxis={**ticks, "nticks": min(17, 1 + n_heads)},
        yaxis={**ticks, "autorange": "reversed", "nticks": min(33, 1 + n_layers)},
    )


def _colours(values: np.ndarray, measure: str) -> dict[str, object]:
    """Return the colour axis: around zero for a signed measure, else from zero on."""
    about = ABOUT[measure]
    known = np.abs(values[np.isfinite(values)])
    top = 1.0 if about.bounded else max(FLOOR, float(known.max(initial=0.0)))
    return {
        "colorscale": DIVERGING if about.signed else SEQUENTIAL,
        "cmin": -top if about.signed else 0.0,
        "cmax": top,
        "colorbar": colour_bar(about.unit),
    }
