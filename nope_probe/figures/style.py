"""The one visual language of all figures: colours, markers, words.

Three neutral colours stand for the theme; the report page swaps them on dark screens.
"""

from __future__ import annotations

import plotly.graph_objects as go

INK, GRID, BLANK, ZERO = "#1b1f24", "#d9dce1", "#eceef1", "#8b949e"
SEQUENTIAL, DIVERGING = "Viridis", "RdBu_r"
COLOURS = {
    "content": "#7a7a7a",
    "mask": "#d55e00",
    "rope": "#0070e3",
    "pos_embed": "#538ff5",
    "interaction": "#ab3e98",
    "w_q": "#1da2a5",
    "w_k": "#18753a",
    "w_o": "#999847",
    "w_v": "#8952a0",
    "mlp": "#8a5969",
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
    "interaction": "cross",
    "w_q": "triangle-up",
    "w_k": "triangle-down",
    "w_o": "star",
    "w_v": "hexagon",
    "mlp": "x",
    "qk": "triangle-up",
    "ov": "star",
    "mean_term": "square",
    "covariance_term": "circle",
    "intact": "circle",
}
WORDS = {
    "all": "whole pattern",
    "difference": "all players",
    "content": "content",
    "mask": "causal mask",
    "rope": "RoPE",
    "pos_embed": "learned positions",
    "mask_x_rope": "mask × RoPE",
    "mask_x_pos_embed": "mask × learned positions",
    "w_q": "W_Q",
    "w_k": "W_K",
    "w_o": "W_O",
    "w_v": "W_V",
    "mlp": "MLP",
    "norms": "the norms' weights",
    "qk": "QK circuit",
    "ov": "OV circuit",
    "mean_term": "mean term",
    "covariance_term": "covariance term",
    "intact": "intact model",
}
SHORT = {"mask": "mask", "pos_embed": "positions", "qk": "QK", "ov": "OV"}
_AXIS = {
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
    }
)


def colour(name: str) -> str:
    """Give a component's colour, the same in every figure; unions and interactions share one."""
    if "_x_" in name or "+" in name:
        return COLOURS["interaction"]
    return COLOURS.get(name, INK)


def symbol(name: str) -> str:
    """Give a component's marker, so that colour is never the only sign."""
    if "_x_" in name or "+" in name:
        return SYMBOLS["interaction"]
    return SYMBOLS.get(name, "circle")


def words(name: str) -> str:
    """Say a component's name as a reader says it; in a union, in short.

    Example:
        >>> words("mask"), words("mask+w_q")
        ('causal mask', 'mask + W_Q')
    """
    if "+" not in name:
        return WORDS.get(name, name)
    return " + ".join(SHORT.get(part) or words(part) for part in name.split("+"))
