"""A slider over layers, of figures that hold the traces of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figures.grid import keep


def add_slider(
    figure: go.Figure,
    n_layers: int,
    panels: int,
    first: int,
    scales: Float[np.ndarray, "layer 2"] | None = None,
    patches: Sequence[Mapping[str, object]] | None = None,
) -> None:
    """Add a layer slider to a figure whose traces are ordered by layer, then panel.

    Args:
        figure: the figure.
        n_layers: how many layers its traces show.
        panels: traces per layer.
        first: the layer that is shown first.
        scales: each layer's colour limits.
        patches: each layer's own layout keys, in plotly.js's dotted form.
    """
    steps = []
    for layer in range(n_layers):
        visible = [each == layer for each in range(n_layers) for _ in range(panels)]
        limits: dict[str, object] = {}
        if scales is not None:
            limits |= colour_limits(scales[layer], "coloraxis.")
        if patches is not None:
            limits |= patches[layer]
        step = {"label": str(layer), "method": "update", "args": [{"visible": visible}, limits]}
        steps.append(step)
    slider = {"active": first, "currentvalue": {"prefix": "L"}, "steps": steps}
    # To the right of the colour bar.
    figure.update_layout(sliders=[{**slider, "x": 0.5, "len": 0.5, "pad": {"t": 44}}])
    kept = None if scales is None else scales.tolist()
    own = None if patches is None else [dict(each) for each in patches]
    keep(figure, n_layers=n_layers, first=first, scales=kept, patches=own)


def colour_limits(scale: Float[np.ndarray, "2"], prefix: str = "") -> dict[str, float]:
    """Return the layout keys of a colour axis from its two limits."""
    return {f"{prefix}cmin": float(scale[0]), f"{prefix}cmax": float(scale[1])}
