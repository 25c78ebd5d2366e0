"""Simulation and theory -> plotly figures: maps on a fixed scale, rows and steps against theory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import sample_colorscale

from nope_probe.figures.grid import Grid, axis, keep, place
from nope_probe.figures.intervals import FLAT_WORDS, NOISE_ERRORS, NOISE_NATS, widened
from nope_probe.figures.maps import MAX_POSITIONS, Layers, ScoreMapsLike, score_maps
from nope_probe.figures.style import ZERO

LINES = ["#7d6be0", "#1d87c9", "#2b9a58"]  # between them, all show on paper and on dark screens


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One series per layer, with errors and the values of the theory.

    Attributes:
        x: the values' places on the x axis.
        values, errors: estimates and two standard errors.
        theory: the mean field's values; None for no line.
    """

    x: Float[np.ndarray, " x"]
    values: Float[np.ndarray, "layer x"]
    errors: Float[np.ndarray, "layer x"]
    theory: Float[np.ndarray, "layer x"] | None = None


def fixed_scale_maps(
    maps: Layers | ScoreMapsLike,
    *,
    title: str,
    high: float = 1.0,
    max_positions: int = MAX_POSITIONS,
) -> go.Figure:
    """Draw score maps on one colour scale from 0 to `high`, as the paper does.

    Args:
        maps: what `capture_scores` returned, or mean scores in nats.
        title: the title.
        high: the score at the upper end of the scale, nats.
        max_positions: larger maps are pooled to this many positions.
    """
    figure = score_maps(maps, title=title, max_positions=max_positions)
    for name in figure.layout:
        if name.startswith("coloraxis"):
            figure.layout[name].update(cmin=0.0, cmax=high)
    if figure.layout.sliders:
        for step in figure.layout.sliders[0].steps:
            step.args[1].update({"coloraxis.cmin": 0.0, "coloraxis.cmax": high})
        keep(figure, scales=[[0.0, high]] * len(figure.layout.sliders[0].steps))
    return figure


def maps_above_noise(
    maps: Layers | ScoreMapsLike,
    errors: Float[np.ndarray, "layer query_pos key_pos"],
    *,
    max_positions: int = MAX_POSITIONS,
) -> go.Figure:
    """Draw score maps, each layer on a scale of its own that is far wider than the noise.

    A layer whose cells differ by no more than their errors is drawn flat, and its title says so.

    Args:
        maps: what `capture_scores` returned, or mean scores in nats.
        errors: the standard errors of the cells, nats.
        max_positions: larger maps are pooled to this many positions.
    """
    noise = [float(np.nanmedian(each)) for each in errors]
    return score_maps(maps, max_positions=max_positions, noise=noise)


def rows_against_theory(curves: Mapping[str, Curves]) -> go.Figure:
    """Draw the last query's scores over its keys: dots with two standard errors; theory: lines."""
    return _panels(
        curves,
        title="The last query's scores: simulation (dots) and mean field (lines)",
        x_title="key position",
        y_title="score, nats",
    )


def steps_by_distance(curves: Mapping[str, Curves]) -> go.Figure:
    """Draw the mean gain in score of a key that is nearer by one, at each distance."""
    figure = _panels(
        curves,
        title="Mean step of the score towards the query",
        x_title="distance i - j",
        y_title="step, nats",
    )
    return figure.update_yaxes(zeroline=True, zerolinecolor=ZERO)


def _panels(curves: Mapping[str, Curves], *, title: str, x_title: str, y_title: str) -> go.Figure:
    n_layers = len(next(iter(curves.values())).values)
    colours = sample_colorscale(LINES, list(np.linspace(0, 1, max(2, len(curves)))))
    figure = go.Figure()
    for (name, each), colour in zip(curves.items(), colours, strict=False):
        for layer in range(n_layers):
            figure.add_traces(list(_traces(name, each, layer, colour)))
    wide = Grid(columns=min(4, n_layers), panel=230, x_title=x_title, y_title=y_title, bottom=110)
    narrow = replace(wide, columns=min(2, n_layers), panel=150, gap=0.14, left=50)
    ranges = [_range(curves.values(), layer) for layer in range(n_layers)]
    flat = [FLAT_WORDS if found else "" for found in ranges]
    titles = [f"L{layer}{words}" for layer, words in enumerate(flat)]
    place(figure, title, titles, wide, narrow)
    for layer, found in enumerate(ranges):
        if found is not None:
            middle = {"tickvals": [sum(found) / 2], "tickformat": ".3~f"}  # the rest is noise
            figure.update_layout({f"yaxis{axis(layer)}": {"range": list(found), **middle}})
        if layer:
            figure.update_layout({f"xaxis{axis(layer)}": {"matches": "x"}})
    return figure


def _range(curves: Collection[Curves], layer: int) -> tuple[float, float] | None:
    """Return the y range of a layer all of whose curves are noise; None for any other."""
    drawn = [
        each.values[layer]
        if each.theory is None
        else np.append(each.values[layer], each.theory[layer])
        for each in curves
    ]
    errors = np.concatenate([each.errors[layer] / 2 for each in curves])
    found = np.concatenate(drawn)
    known = found[np.isfinite(found)]
    if not known.size:
        return None
    floor = max(NOISE_NATS, NOISE_ERRORS * float(np.nanmedian(errors)))
    low, high, flat = widened(float(known.min()), float(known.max()), floor)
    return (low, high) if flat else None


def _traces(name: str, curves: Curves, layer: int, colour: str) -> list[go.Scatter]:
    place_of = {"xaxis": f"x{axis(layer)}", "yaxis": f"y{axis(layer)}", "legendgroup": name}
    dots = go.Scatter(
        x=curves.x,
        y=curves.values[layer],
        error_y={"array": curves.errors[layer], "thickness": 1, "width": 0},
        mode="markers",
        marker={"size": 4, "color": colour},
        name=name,
        showlegend=layer == 0,
        hovertemplate=f"%{{x}}: %{{y:.4g}} nat<extra>{name}</extra>",
        **place_of,
    )
    if curves.theory is None:
        return [dots]
    line = go.Scatter(
        x=curves.x,
        y=curves.theory[layer],
        mode="lines",
        line={"color": colour, "width": 1.5},
        showlegend=False,
        hovertemplate=f"%{{x}}: %{{y:.4g}} nat<extra>{name}, mean field</extra>",
        **place_of,
    )
    return [line, dots]
