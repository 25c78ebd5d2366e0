"""Maps behind a layer slider -> one figure with the maps of all layers, as an image needs it."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.figures.style import DIVERGING, ColourScale


def unfold_layers(figure: go.Figure) -> go.Figure:
    """Return a figure of the maps of all layers, each on its own colours, instead of a slider.

    A figure without a slider, or of curves, comes back as it is.

    Example:
        >>> from nope_probe import figures
        >>> one = figures.term_maps({"all": np.ones((3, 5, 5))}, title="pattern")
        >>> [panel.name for panel in unfold_layers(one).data]
        ['L0', 'L1', 'L2']
    """
    meta = figure.layout.meta or {}
    n_layers, scales = meta.get("n_layers", 1), meta.get("scales")
    if n_layers < 2 or not scales:
        return figure
    is_signed = figure.layout.coloraxis.colorscale == _colours(DIVERGING)
    per_layer = len(figure.data) // n_layers
    groups = [
        [
            _panel(trace, f"L{layer}", per_layer > 1, scales[layer], is_signed)
            for trace in figure.data[layer * per_layer : (layer + 1) * per_layer]
        ]
        for layer in range(n_layers)
    ]
    return panel_groups(groups, title=figure.layout.title.text or "")


def _colours(scale: ColourScale) -> Any:
    return go.layout.Coloraxis(colorscale=scale).colorscale


def _panel(
    trace: go.Heatmap, layer: str, is_named: bool, scale: list[float], is_signed: bool
) -> Panel:
    values = cells_of(trace)
    return Panel(
        name=f"{layer}, {trace.name}" if is_named else layer,
        values=values,
        low=scale[0],
        high=scale[1],
        diverging=is_signed,
        positions=round(trace.dx * len(values)),
    )


def cells_of(trace: go.Heatmap) -> Float[np.ndarray, "query_pos key_pos"]:
    """Return the cells of a heat map, also of one that was read from a page."""
    z = trace.to_plotly_json()["z"]
    if not isinstance(z, dict):
        return np.asarray(z)
    shape = [int(each) for each in str(z["shape"]).split(",")]
    return np.frombuffer(b64decode(z["bdata"]), z["dtype"]).reshape(shape)
