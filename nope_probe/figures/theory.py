"""Simulation and theory -> plotly figures: rows and steps of simulated maps against the theory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import sample_colorscale

from nope_probe.figures.grid import Grid, Trace, axes, named, place, set_axes, zoom_together
from nope_probe.figures.intervals import FLAT_WORDS, NOISE_ERRORS, NOISE_NATS, widened
from nope_probe.figures.style import ZERO

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


def rows_against_theory(curves: Mapping[str, Curves]) -> go.Figure:
    """Draw the last query's scores over its keys: dots with two standard errors; theory: lines."""
    return _panels(
        curves,
        title="The last query's scores: simulation (dots) and mean field (lines)",
        x_title="key position",
        y_title="score, nats",
    )


def steps_by_distance(curves: Mapping[str, Curves]) -> go.Figure:
    """Draw the mean gain in score of a key one position nearer, at each distance."""
    return _panels(
        curves,
        title="Mean step of the score towards the query",
        x_title="distance i - j",
        y_title="step, nats",
        zeroline=True,
        zerolinecolor=ZERO,
    )


def _panels(
    curves: Mapping[str, Curves], *, title: str, x_title: str, y_title: str, **y_axis: object
) -> go.Figure:
    """Draw a panel per layer; a layer with only noise is flat, and its title says so."""
    n_layers = len(next(iter(curves.values())).values)
    inks = sample_colorscale(LINES, list(np.linspace(0, 1, max(2, len(curves)))))
    traces: list[Trace] = []
    for (name, series), ink in zip(curves.items(), inks, strict=False):
        for layer in range(n_layers):
            hover = "%{x}: %{y:.4g} nat"
            theory = {
                **named(layer, f"{name}, mean field", hover),
                "type": "scatter",
                "x": series.x,
                "y": series.theory[layer],
                "mode": "lines",
                "line": {"color": ink, "width": 1.5},
                "legendgroup": name,
                "showlegend": False,
            }
            simulation = {
                **named(layer, name, hover),
                "type": "scatter",
                "x": series.x,
                "y": series.values[layer],
                "error_y": {"array": series.errors[layer], "thickness": 1, "width": 0},
                "mode": "markers",
                "marker": {"size": 4, "color": ink},
            }
            traces += [theory, simulation]
    ranges = [_noise_range(curves.values(), layer) for layer in range(n_layers)]
    wide = Grid(columns=min(4, n_layers), panel=230, x_title=x_title, y_title=y_title, bottom=110)
    phone = {"columns": min(2, n_layers), "panel": 150, "gap": 0.14, "left": 50}
    titles = [f"L{layer}{FLAT_WORDS if limits else ''}" for layer, limits in enumerate(ranges)]
    layout = place(title, titles, wide, **phone)
    zoom_together(layout, "x")
    set_axes(layout, "y", **y_axis)
    for keys, limits in zip(axes(layout, "y"), ranges, strict=True):
        if limits is not None:
            middle = {"tickvals": [sum(limits) / 2], "tickformat": ".3~f"}  # the rest is noise
            keys |= {"range": limits, **middle}
    return go.Figure(traces, layout)


def _noise_range(curves: Collection[Curves], layer: int) -> tuple[float, float] | None:
    """Return the y range of a layer whose curves are all noise; None for other layers."""
    drawn = np.concatenate(
        [[curve.values[layer], curve.theory[layer]] for curve in curves], axis=None
    )
    errors = np.concatenate([curve.errors[layer] / 2 for curve in curves])
    known = drawn[np.isfinite(drawn)]
    if not known.size:
        return None
    floor = max(NOISE_NATS, NOISE_ERRORS * float(np.nanmedian(errors)))
    low, high, flat = widened(float(known.min()), float(known.max()), floor)
    return (low, high) if flat else None
