"""Where the panels of a figure stand, on a wide screen and on a phone.

A figure is laid out for a wide screen. What a phone needs instead is kept beside it, in
`layout.meta["narrow"]`, as a patch of layout keys that the report page applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from nope_probe.figures.style import TEMPLATE

Extent = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How panels stand: in rows of `columns`.

    Attributes:
        panel: height of a panel, px.
        row_gap: height between two rows, for the titles and ticks there, px.
        gap: between panels in a row, as a share of the width.
        top, bottom, left, right: margins, px; a legend or colour bar stands in the bottom one.
        x_title, y_title: the axes' titles, said once per column and row; empty for none.
        shared_y: whether the panels of a row share the ticks of the first.
    """

    columns: int
    panel: int
    row_gap: int = 60
    gap: float = 0.06
    top: int = 64
    bottom: int = 84
    left: int = 60
    right: int = 12
    x_title: str = ""
    y_title: str = ""
    shared_y: bool = False

    def rows(self, panels: int) -> int:
        """Count the rows that so many panels need."""
        return -(-panels // self.columns)

    def height(self, panels: int) -> int:
        """Give the figure's height in px."""
        return self.inner(panels) + self.top + self.bottom

    def inner(self, panels: int) -> int:
        """Give the plotting area's height in px."""
        return self.rows(panels) * (self.panel + self.row_gap) - self.row_gap

    def domains(self, panels: int) -> list[tuple[Extent, Extent]]:
        """Give each panel's extent along x and y, as shares of the plotting area."""
        width = (1 - self.gap * (self.columns - 1)) / self.columns
        tall, step = (length / self.inner(panels) for length in (self.panel, self._pitch))
        found = []
        for panel in range(panels):
            row, column = divmod(panel, self.columns)
            left, top = column * (width + self.gap), 1 - row * step
            found.append(((left, min(1.0, left + width)), (max(0.0, top - tall), top)))
        return found

    @property
    def _pitch(self) -> int:
        return self.panel + self.row_gap

    def layout(self, panels: int) -> dict[str, Any]:
        """Give the layout keys that place the panels, as one flat patch."""
        patch: dict[str, Any] = {
            "height": self.height(panels),
            "margin": {"t": self.top, "b": self.bottom, "l": self.left, "r": self.right},
        }
        for index, (x, y) in enumerate(self.domains(panels)):
            first, last = index % self.columns == 0, index + self.columns >= panels
            patch[f"xaxis{axis(index)}.domain"] = list(x)
            patch[f"yaxis{axis(index)}.domain"] = list(y)
            patch[f"xaxis{axis(index)}.title.text"] = self.x_title if last else ""
            patch[f"yaxis{axis(index)}.title.text"] = self.y_title if first else ""
            patch[f"yaxis{axis(index)}.showticklabels"] = first or not self.shared_y
        return patch


def axis(panel: int) -> str:
    """Give plotly's suffix for a panel's axes: nothing for the first, then 2, 3, ...

    Example:
        >>> axis(0), axis(1)
        ('', '2')
    """
    return "" if panel == 0 else str(panel + 1)


def place(figure: go.Figure, title: str, panels: Sequence[str], wide: Grid, narrow: Grid) -> None:
    """Set a figure's title, its panels and their titles, and keep its narrow layout."""
    keys = wide.layout(len(panels))
    for at in (axis(index) for index in range(len(panels))):
        keys |= {f"xaxis{at}.anchor": f"y{at}", f"yaxis{at}.anchor": f"x{at}"}
    patch(figure, keys)
    above = {"x": 0.5, "y": 1, "yanchor": "bottom", "showarrow": False}
    figure.update_layout(
        template=TEMPLATE,
        title={"text": title},
        annotations=[{"text": name, **inside(i), **above} for i, name in enumerate(panels)],
    )
    keep(figure, narrow=narrow.layout(len(panels)))


def inside(panel: int) -> dict[str, str]:
    """Say that an annotation's x and y are shares of a panel."""
    return {"xref": f"x{axis(panel)} domain", "yref": f"y{axis(panel)} domain"}


def patch(figure: go.Figure, keys: Mapping[str, Any]) -> None:
    """Set layout keys written as plotly.js writes them, such as `xaxis2.domain`."""
    nested: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    figure.update_layout(nested)


def keep(figure: go.Figure, **entries: Any) -> None:
    """Keep beside a figure what the report page must know about it."""
    figure.update_layout(meta={**(figure.layout.meta or {}), **entries})
