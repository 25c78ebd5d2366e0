"""Maps along a quantity that was varied, one slider step per value."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from nope_probe.figures.captures import Layers
from nope_probe.figures.maps import score_maps

CLIPPED = 5.0  # percent of the cells beyond each colour limit: the diagonal would hide the rest


def sweep_maps(
    maps: Layers, values: Sequence[float], *, name: str, title: str, first: int = 0
) -> go.Figure:
    """Draw one map per value of a quantity, such as alpha, with a slider over the values.

    Args:
        maps: a score map per value, nats.
        values: the quantity's values, in the slider's order.
        name: what the quantity is called.
        title: the figure's title.
        first: which value is shown first.

    Raises:
        ValueError: unless there is a map for each value.

    Example:
        >>> import numpy as np
        >>> from nope_probe import figures
        >>> figure = figures.sweep_maps(np.zeros((2, 5, 5)), [0, 0.2], name="alpha", title="L1")
        >>> figure.layout.sliders[0].currentvalue.prefix, figure.layout.sliders[0].steps[1].label
        ('alpha = ', '0.2')
    """
    if len(maps) != len(values):
        raise ValueError(f"expected a map for each of {len(values)} values, got {len(maps)}")
    figure = score_maps(maps, title=title, layer=first, multiples=0, clipped=CLIPPED)
    slider, labels = figure.layout.sliders[0], [f"{value:g}" for value in values]
    slider.currentvalue.prefix = f"{name} = "
    for step, trace, label in zip(slider.steps, figure.data, labels, strict=True):
        step.label = label
        trace.hovertemplate = trace.hovertemplate.replace(
            f"<extra>{trace.name}<", f"<extra>{name} = {label}<"
        )
        trace.name = f"{name} = {label}"
    return figure
