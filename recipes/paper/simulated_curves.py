"""Curves of simulations and their theory -> plotly figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import sample_colorscale

from nope_probe.figures.style import (
    FLAT_WORDS,
    NOISE_ERRORS,
    NOISE_NATS,
    PlotlyTrace,
    draw_panels,
    finite,
    scatter,
    widened,
)

MOST_COLUMNS = 4
LINES = ["#7d6be0", "#1d87c9", "#2b9a58"]  # colours between these show on paper and on dark screens


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A series per layer, with errors and the values of the theory.

    Attributes:
        x: the values' places on the x axis.
        values, errors: estimates and two standard errors.
        theory: the mean field's values.
    """

    x: Float[np.ndarray, " x"]
    values: Float[np.ndarray, "layer x"]
    errors: Float[np.ndarray, "layer x"]
    theory: Float[np.ndarray, "layer x"]


def simulated_curves(
    curves: Mapping[str, Curves], *, title: str, x_title: str, y_title: str
) -> go.Figure:
    """Draw simulations as dots with two standard errors, and the theory as lines, per layer.

    A layer with only noise is flat, and its title says so.

    Args:
        curves: by the name in the legend.
        title: the figure's title.
        x_title: of the x axes.
        y_title: of the y axes.
    """
    n_layers = len(next(iter(curves.values())).values)
    ranges = [_noise_range(curves.values(), layer) for layer in range(n_layers)]
    figure = draw_panels(
        title,
        {
            f"L{layer}{FLAT_WORDS if limits else ''}": _simulated(curves, layer)
            for layer, limits in enumerate(ranges)
        },
        zoom="x",
        columns=min(MOST_COLUMNS, n_layers),
        panel=230,
        x_title=x_title,
        y_title=y_title,
        bottom=110,
    )
    for keys, limits in zip(figure.select_yaxes(), ranges, strict=True):
        if limits is not None:  # all but the middle is noise
            keys.update(range=limits, tickvals=[sum(limits) / 2], tickformat=".3~f")
    return figure


def _simulated(curves: Mapping[str, Curves], layer: int) -> list[PlotlyTrace]:
    """Return the theory and the simulation of a layer."""
    inks = sample_colorscale(LINES, list(np.linspace(0, 1, max(2, len(curves)))))
    traces: list[PlotlyTrace] = []
    hover = "%{x}: %{y:.4g} nat"
    for (name, series), ink in zip(curves.items(), inks, strict=False):
        theory = scatter(
            f"{name}, mean field",
            hover,
            x=series.x,
            y=series.theory[layer],
            mode="lines",
            line={"color": ink, "width": 1.5},
            legendgroup=name,
            showlegend=False,
        )
        simulation = scatter(
            name,
            hover,
            x=series.x,
            y=series.values[layer],
            error_y={"array": series.errors[layer], "thickness": 1, "width": 0},
            mode="markers",
            marker={"size": 4, "color": ink},
        )
        traces += [theory, simulation]
    return traces


def _noise_range(curves: Collection[Curves], layer: int) -> tuple[float, float] | None:
    """Return the y range of a layer whose curves are all noise; None for other layers."""
    known = finite(np.array([[curve.values[layer], curve.theory[layer]] for curve in curves]))
    errors = np.concatenate([curve.errors[layer] / 2 for curve in curves])
    if not known.size:
        return None
    floor = max(NOISE_NATS, NOISE_ERRORS * float(np.nanmedian(errors)))
    low, high, flat = widened(float(known.min()), float(known.max()), floor)
    return (low, high) if flat else None
