"""The visual style of all figures: colours, markers, the template, colour bars.

The report page replaces the three neutral colours INK, GRID and BLANK on dark screens.
"""

from __future__ import annotations

import plotly.graph_objects as go

INK, GRID, BLANK, ZERO = "#1b1f24", "#d9dce1", "#eceef1", "#8b949e"
TITLE_HEIGHT = 16  # px of a figure's top margin that its title takes
SEQUENTIAL, DIVERGING = "Viridis", "RdBu_r"
COLOURS = {
    "content": "#7a7a7a",
    "mask": "#d55e00",
    "rope": "#0070e3",
    "pos_embed": "#538ff5",
    "alibi": "#4a78c8",
    "interaction": "#ab3e98",
    "w_q": "#1da2a5",
    "w_k": "#18753a",
    "w_o": "#999847",
    "w_v": "#8952a0",
    "mlp": "#8a5969",
    "norms": "#6a7a99",
    "qk": "#3ba763",
    "ov": "#a64b21",
    "mean_term": "#535dba",
    "covariance_term": "#8d6620",
    "intact": INK,
}
SYMBOLS = {
    "content": "circle",
    "mask": "square",
    "rope": "diamond",
    "pos_embed": "diamond",
    "alibi": "diamond",
    "interaction": "cross",
    "w_q": "triangle-up",
    "w_k": "triangle-down",
    "w_o": "star",
    "w_v": "hexagon",
    "mlp": "x",
    "norms": "pentagon",
    "qk": "triangle-up",
    "ov": "star",
    "mean_term": "square",
    "covariance_term": "circle",
    "intact": "circle",
}
TICKS = {"exponentformat": "power", "minexponent": 4}  # no "200n", no "50k"
_AXIS = {
    **TICKS,
    "gridcolor": GRID,
    "zerolinecolor": ZERO,
    "linecolor": GRID,
    "title": {"standoff": 8, "font": {"size": 13}},
    "exponentformat": "power",  # else 2e-7 nats are written 200n
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


def colour(name: str) -> str:
    """Return a component's colour, the same in every figure; unions and interactions share one."""
    if "_x_" in name or "+" in name:
        return COLOURS["interaction"]
    return COLOURS.get(name, INK)


def symbol(name: str) -> str:
    """Return a component's marker, so that colour is never the only sign."""
    if "_x_" in name or "+" in name:
        return SYMBOLS["interaction"]
    return SYMBOLS.get(name, "circle")


def colour_bar(title: str = "") -> dict[str, object]:
    """Return the horizontal colour bar at the bottom left of a figure."""
    where = {"x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"}
    size = {"thickness": 10, "len": 300, "lenmode": "pixels", "nticks": 5, "outlinewidth": 0}
    size |= TICKS
    return {"orientation": "h", "title": {"text": title, "side": "bottom"}, **where, **size}
