"""The visual style of all figures: colour scales, the template, colour bars.

On dark screens, pages replace the colours of ON_DARK.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale, sequential

from nope_probe.components import INK

GRID, BLANK, ZERO = "#d9dce1", "#eceef1", "#8b949e"
TITLE_HEIGHT = 16  # px of a figure's title in the top margin
# Signed values, blue to red (ColorBrewer's RdBu): zero is light on paper, and dark on dark screens.
_SIGNED = "#053061 #2166ac #4393c3 #92c5de #d1e5f0 #f7f7f7 #fddbc7 #f4a582 #d6604d #b2182b #67001f"
_DARK = "#a9d8fb #6cb6ee #4190d0 #2d689b #1e4361 #16191d #592a23 #913f30 #c95d43 #ee8b6b #fdc5ab"
STOPS = {  # in the form that the scripts of explorers and of head maps read
    "sequential": list(sequential.Viridis),
    "diverging": _SIGNED.split(),
    "divergingOnDark": _DARK.split(),
}
ColourScale = str | list[tuple[float, str]]
SEQUENTIAL: ColourScale = "Viridis"
DIVERGING: ColourScale = [(index / 10, stop) for index, stop in enumerate(STOPS["diverging"])]
ON_DARK = {INK: "#e8eaed", GRID: "#3a4048", BLANK: "#262b32"}
ON_DARK |= dict(zip(STOPS["diverging"], STOPS["divergingOnDark"], strict=True))
TICKS = {"exponentformat": "power", "minexponent": 4}  # no "200n", no "50k"
_AXIS = {
    **TICKS,  # else 2e-7 nats are written 200n
    "gridcolor": GRID,
    "zerolinecolor": ZERO,
    "linecolor": GRID,
    "title": {"standoff": 8, "font": {"size": 13}},
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "title": {"x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 12}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": ZERO, "activecolor": INK},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "coloraxis": {"colorbar": {"exponentformat": "power"}},
    }
)


def layer_colours(n_layers: int) -> list[str]:
    """Return a colour for each layer, from dark to light with depth."""
    return sample_colorscale(SEQUENTIAL, list(np.linspace(0.05, 0.85, max(2, n_layers))))[:n_layers]


def colour_bar(
    title: str = "", across: tuple[float, float] | None = None, y: float = 0.0
) -> dict[str, object]:
    """Return a horizontal colour bar: at the figure's bottom left, or below a panel.

    Args:
        title: the unit.
        across: the panel's extent along x, as shares of the plotting area.
        y: the upper edge of a bar below a panel, as a share of the plotting area.
    """
    bar = {"orientation": "h", "outlinewidth": 0, "title": {"text": title, "side": "bottom"}}
    if across is None:
        where = {"x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"}
        return {
            **bar,
            **where,
            **TICKS,
            "thickness": 10,
            "len": 300,
            "lenmode": "pixels",
            "nticks": 5,
        }
    along = {"x": sum(across) / 2, "xanchor": "center", "len": across[1] - across[0], "xpad": 0}
    down = {"y": y, "yref": "paper", "yanchor": "top", "ypad": 0, "tickangle": 0}
    return {**bar, **along, **down, "thickness": 8, "tickfont": {"size": 10}, "nticks": 4}
