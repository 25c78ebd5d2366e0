"""A figure's layout, for a wide screen and for a phone, and its slider over layers.

A figure is laid out for a wide screen. The layout keys that differ on a phone are kept in
`layout.meta["narrow"]`; the report page applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figures.style import TEMPLATE, ZERO

Extent = tuple[float, float]
SLIDER = 84  # px of a slider, with its value above and its labels below


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A layout of panels in rows.

    Attributes:
        columns: panels in a row.
        panel: height of a panel, px.
        row_gap: height between two rows, for titles and ticks, px.
        gap: width between panels in a row, as a share of the figure's width.
        top, bottom, left, right: margins, px; the bottom margin has the legend or colour bar.
        x_title, y_title: the axes' titles, once per column and row; empty for none.
        shared_y: whether the panels of a row share the ticks of the first panel.
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
        """Return the number of rows for this number of panels."""
        return -(-panels // self.columns)

    def height(self, panels: int) -> int:
        """Return the figure's height in px."""
        return self.inner(panels) + self.top + self.bottom

    def inner(self, panels: int) -> int:
        """Return the plotting area's height in px."""
        return self.rows(panels) * (self.panel + self.row_gap) - self.row_gap

    def domains(self, panels: int) -> list[tuple[Extent, Extent]]:
        """Return each panel's extent along x and y, as shares of the plotting area."""
        width = (1 - self.gap * (self.columns - 1)) / self.columns
        tall, step = (length / self.inner(panels) for length in (self.panel, self._pitch))
        extents = []
        for panel in range(panels):
            row, column = divmod(panel, self.columns)
            left, top = column * (width + self.gap), 1 - row * step
            extents.append(((left, min(1.0, left + width)), (max(0.0, top - tall), top)))
        return extents

    @property
    def _pitch(self) -> int:
        return self.panel + self.row_gap

    def layout(self, panels: int) -> dict[str, Any]:
        """Return the layout keys that place the panels, as one flat dictionary."""
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
    """Return plotly's suffix for a panel's axes: empty for the first, then 2, 3, ...

    Example:
        >>> axis(0), axis(1)
        ('', '2')
    """
    return "" if panel == 0 else str(panel + 1)


def place(
    figure: go.Figure, title: str, panels: Sequence[str], wide: Grid, **phone: Any
) -> tuple[Grid, Grid]:
    """Set a figure's title, its panels and their titles, and store its layout for a phone.

    Args:
        figure: the figure, with its traces.
        title: the figure's title.
        panels: the panels' titles.
        wide: the layout for a wide screen.
        phone: the fields of `Grid` that differ on a phone.

    Returns:
        Both layouts.
    """
    above = {"x": 0.5, "y": 1, "yanchor": "bottom", "showarrow": False}
    notes = [{"text": name, **inside(i), **above} for i, name in enumerate(panels)]
    keys = {"template": TEMPLATE, "title.text": title, "annotations": notes}
    for at in (axis(index) for index in range(len(panels))):
        keys |= {f"xaxis{at}.anchor": f"y{at}", f"yaxis{at}.anchor": f"x{at}"}
    narrow = replace(wide, **phone)
    patch(figure, {**keys, **wide.layout(len(panels))})
    keep(figure, narrow=narrow.layout(len(panels)))
    return wide, narrow


def annotate(figure: go.Figure, notes: Iterable[Mapping[str, Any]]) -> None:
    """Add annotations to a figure."""
    # update_layout would walk every annotation again, which takes much of a page's time.
    figure.layout.annotations = [*figure.layout.annotations, *notes]


def zoom_together(figure: go.Figure, along: Literal["x", "y", "xy"] = "xy") -> None:
    """Match the panels' x axes, y axes or both to the first panel's."""
    if "x" in along:
        figure.update_xaxes(matches="x").layout.xaxis.matches = None
    if "y" in along:
        figure.update_yaxes(matches="y").layout.yaxis.matches = None


def on(panel: int) -> dict[str, str]:
    """Return the keys that draw a trace on a panel's axes."""
    return {"xaxis": f"x{axis(panel)}", "yaxis": f"y{axis(panel)}"}


def named(panel: int, label: str, hover: str) -> dict[str, object]:
    """Return the keys of a named trace on a panel; the legend shows only the first panel's."""
    return {
        **on(panel),
        "name": label,
        "legendgroup": label,
        "showlegend": panel == 0,
        "hovertemplate": f"{hover}<extra>{label}</extra>",
    }


def inside(panel: int) -> dict[str, str]:
    """Return the keys that make an annotation's x and y shares of a panel."""
    return {"xref": f"x{axis(panel)} domain", "yref": f"y{axis(panel)} domain"}


def draw_guide(figure: go.Figure, panel: int, **at: float) -> None:
    """Draw a dotted line across a panel, at one value of `x` or of `y`."""
    ((across, value),) = at.items()
    along = "y" if across == "x" else "x"
    figure.add_shape(
        {f"{across}0": value, f"{across}1": value, f"{along}0": 0, f"{along}1": 1},
        type="line",
        line={"color": ZERO, "width": 1, "dash": "dot"},
        **{f"{across}ref": f"{across}{axis(panel)}"},
        **{f"{along}ref": f"{along}{axis(panel)} domain"},
    )


def patch(figure: go.Figure, keys: Mapping[str, Any]) -> None:
    """Set layout keys in plotly.js's form, such as `xaxis2.domain` or `annotations[0].text`."""
    layout = figure.layout.to_plotly_json()
    for key, value in keys.items():
        *path, last = key.replace("]", "").replace("[", ".").split(".")
        at = layout
        for part in path:
            at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
        at[last] = value
    figure.layout = layout  # plotly's `update_layout` takes several times as long


def keep(figure: go.Figure, **entries: Any) -> None:
    """Store entries in a figure's metadata, for the report page."""
    figure.update_layout(meta={**(figure.layout.meta or {}), **entries})


def add_slider(
    figure: go.Figure,
    layers: Sequence[int],
    panels: int,
    first: int,
    scales: Float[np.ndarray, "layer 2"] | None = None,
    patches: Sequence[Mapping[str, object]] | None = None,
) -> None:
    """Add a layer slider below a figure with placed panels; traces go by layer, then panel.

    Args:
        figure: the figure.
        layers: the numbers of the layers that its traces show.
        panels: traces per layer.
        first: the place of the layer that is shown first.
        scales: each layer's colour limits.
        patches: each layer's own layout keys, in plotly.js's dotted form.
    """
    steps = []
    for place, layer in enumerate(layers):
        visible = [shown == layer for shown in layers for _ in range(panels)]
        limits: dict[str, object] = {}
        if scales is not None:
            limits |= colour_limits(scales[place], "coloraxis.")
        if patches is not None:
            limits |= patches[place]
        step = {"label": str(layer), "method": "update", "args": [{"visible": visible}, limits]}
        steps.append(step)
    slider = {"active": first, "currentvalue": {"prefix": "L"}, "steps": steps}
    # The margin grows by the slider's height, so that the panels keep their size.
    margin = figure.layout.margin
    inner = figure.layout.height - margin.t - margin.b
    where = {"x": 0, "len": 1, "y": -margin.b / inner, "yanchor": "top", "pad": {"t": 0, "b": 0}}
    figure.update_layout(sliders=[{**slider, **where}])
    margin.b += SLIDER
    figure.layout.height += SLIDER
    kept = None if scales is None else scales.tolist()
    own = None if patches is None else [dict(patch) for patch in patches]
    keep(figure, n_layers=len(layers), first=first, scales=kept, patches=own)


def colour_limits(scale: Float[np.ndarray, "2"], prefix: str = "") -> dict[str, float]:
    """Return the layout keys of a colour axis from its two limits."""
    return {f"{prefix}cmin": float(scale[0]), f"{prefix}cmax": float(scale[1])}
