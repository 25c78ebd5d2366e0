"""The one visual language of all figures: colours, scales, words and the grid of panels.

A figure knows two layouts: the wide one that it has, and a narrow one for phones, kept in
`layout.meta["narrow"]` as a patch that the report page applies. Three neutral colours stand for the
theme: the page swaps them for dark screens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

INK, GRID, BLANK = "#1b1f24", "#d9dce1", "#eceef1"
SEQUENTIAL, DIVERGING = "Viridis", "RdBu_r"
MAX_MULTIPLES = 4

COLOURS = {
    "content": "#7a7a7a",
    "mask": "#d55e00",
    "rope": "#0072b2",
    "pos_embed": "#3b8fc4",
    "interaction": "#b5579b",
    "w_q": "#2a9d8f",
    "w_k": "#117a3d",
    "w_o": "#b8860b",
    "w_v": "#7a5195",
    "mlp": "#882255",
    "qk": "#009e73",
    "ov": "#b07500",
    "route_mean": "#4a55b8",
    "route_content": "#8c7a2e",
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
    "route_mean": "square",
    "route_content": "circle",
    "intact": "circle",
}
WORDS = {
    "all": "all",
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
    "qk": "QK circuit",
    "ov": "OV circuit",
    "route_mean": "mean route",
    "route_content": "content route",
    "intact": "intact model",
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "title": {"x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 16}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"font": {"family": "system-ui, sans-serif"}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left"},
        "xaxis": {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID},
        "yaxis": {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID},
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
    """Say a component's name as a reader says it.

    Example:
        >>> words("w_q+mlp")
        'W_Q + MLP'
    """
    return WORDS.get(name) or " + ".join(WORDS.get(part, part) for part in name.split("+"))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How panels stand: in rows of `columns`, with gaps that leave room for titles and ticks.

    Attributes:
        row_height: height of one row of panels with its gap, px.
        top, bottom: margins for the title and for a legend or colour bar, px.
        gap: between panels in a row, as a share of the width.
    """

    columns: int
    row_height: int
    top: int = 60
    bottom: int = 90
    left: int = 56
    right: int = 16
    gap: float = 0.06
    row_gap: int = 56

    def height(self, panels: int) -> int:
        """Give the figure's height in px."""
        return self.rows(panels) * self.row_height + self.top + self.bottom - self.row_gap

    def rows(self, panels: int) -> int:
        """Count the rows that so many panels need."""
        return -(-panels // self.columns)

    def domains(self, panels: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Give each panel's extent along x and y, as shares of the plotting area."""
        columns, rows = min(self.columns, panels), self.rows(panels)
        width = (1 - self.gap * (columns - 1)) / columns
        inner = rows * self.row_height - self.row_gap
        tall = (self.row_height - self.row_gap) / inner
        step = self.row_height / inner
        found = []
        for panel in range(panels):
            row, column = divmod(panel, columns)
            left, top = column * (width + self.gap), 1 - row * step
            found.append(((left, left + width), (max(0.0, top - tall), top)))
        return found

    def layout(self, panels: int) -> dict[str, Any]:
        """Give the layout keys that place the panels, as one flat patch."""
        patch: dict[str, Any] = {
            "height": self.height(panels),
            "margin": {"t": self.top, "b": self.bottom, "l": self.left, "r": self.right},
        }
        for index, (x, y) in enumerate(self.domains(panels)):
            patch[f"xaxis{axis(index)}.domain"] = list(x)
            patch[f"yaxis{axis(index)}.domain"] = list(y)
        return patch


def axis(panel: int) -> str:
    """Give plotly's suffix for a panel's axes: nothing for the first, then 2, 3, ...

    Example:
        >>> axis(0), axis(1)
        ('', '2')
    """
    return "" if panel == 0 else str(panel + 1)


def place(figure: go.Figure, title: str, panels: Sequence[str], wide: Grid, narrow: Grid) -> None:
    """Set a figure's title, panels and panel titles, and keep its narrow layout for the page."""
    figure.update_layout(template=TEMPLATE, title={"text": title})
    for key, value in wide.layout(len(panels)).items():
        figure.update_layout(_nested(key, value))
    for index, name in enumerate(panels):
        at = axis(index)
        figure.update_layout(
            {f"xaxis{at}": {"anchor": f"y{at}"}, f"yaxis{at}": {"anchor": f"x{at}"}}
        )
        figure.add_annotation(
            text=name,
            xref=f"x{at} domain",
            yref=f"y{at} domain",
            x=0.5 if len(panels) > 1 else 0,
            y=1,
            yanchor="bottom",
            showarrow=False,
            font={"size": 13},
        )
    figure.update_layout(meta={**(figure.layout.meta or {}), "narrow": narrow.layout(len(panels))})


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Turn a relayout key such as `xaxis2.domain` into a nested dict."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def add_meta(figure: go.Figure, **entries: Any) -> None:
    """Keep what the report page must know about a figure beside what plotly knows."""
    figure.update_layout(meta={**(figure.layout.meta or {}), **entries})
