"""The look of all figures: colours, the template, panels on a wide screen and on a phone.

On dark screens, pages replace the colours of ON_DARK. A figure is laid out for a wide screen. The
layout keys that differ on a phone are kept in `layout.meta["narrow"]`; the report page applies
them. Layouts and traces are plain dictionaries of plotly.js, which `go.Figure` validates once, at
the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import sample_colorscale, sequential

from nope_probe.figures.names import plain
from nope_probe.removal import INK

Extent = tuple[float, float]
Layout: TypeAlias = dict[str, Any]  # nested, or flat with keys such as `xaxis2.domain`
Trace: TypeAlias = dict[str, Any]
SLIDER = 84  # px of a slider, with its value above and its labels below
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
        size = {"thickness": 10, "len": 300, "lenmode": "pixels", "nticks": 5}
        return {**bar, **where, **size, **TICKS}
    along = {"x": sum(across) / 2, "xanchor": "center", "len": across[1] - across[0], "xpad": 0}
    down = {"y": y, "yref": "paper", "yanchor": "top", "ypad": 0, "tickangle": 0}
    return {**bar, **along, **down, "thickness": 8, "tickfont": {"size": 10}, "nticks": 4}


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
        inner = self.inner(panels)
        tall, step = self.panel / inner, (self.panel + self.row_gap) / inner
        extents = []
        for panel in range(panels):
            row, column = divmod(panel, self.columns)
            left, top = column * (width + self.gap), 1 - row * step
            extents.append(((left, min(1.0, left + width)), (max(0.0, top - tall), top)))
        return extents

    def layout(self, panels: int) -> Layout:
        """Return the layout keys that place the panels, as one flat dictionary."""
        keys: Layout = {
            "height": self.height(panels),
            "margin": {"t": self.top, "b": self.bottom, "l": self.left, "r": self.right},
        }
        for index, (x, y) in enumerate(self.domains(panels)):
            first, last = index % self.columns == 0, index + self.columns >= panels
            keys[f"xaxis{axis(index)}.domain"] = list(x)
            keys[f"yaxis{axis(index)}.domain"] = list(y)
            keys[f"xaxis{axis(index)}.title.text"] = self.x_title if last else ""
            keys[f"yaxis{axis(index)}.title.text"] = self.y_title if first else ""
            keys[f"yaxis{axis(index)}.showticklabels"] = first or not self.shared_y
        return keys


def axis(panel: int) -> str:
    """Return plotly's suffix for a panel's axes: empty for the first, then 2, 3, ...

    Example:
        >>> axis(0), axis(1)
        ('', '2')
    """
    return "" if panel == 0 else str(panel + 1)


def place(title: str, panels: Sequence[str], wide: Grid, zoom: str = "", **phone: Any) -> Layout:
    """Return a figure's layout: its title, its panels and their titles, and its layout for a phone.

    Args:
        title: the figure's title.
        panels: the panels' titles.
        wide: the layout for a wide screen.
        zoom: `x`, `y` or `xy`, the axes that all panels share.
        phone: the fields of `Grid` that differ on a phone.
    """
    above = {"x": 0.5, "y": 1, "yanchor": "bottom", "showarrow": False}
    layout: Layout = {
        "template": TEMPLATE,
        "title": {"text": title},
        "annotations": [{"text": name, **inside(i), **above} for i, name in enumerate(panels)],
        "meta": {"narrow": replace(wide, **phone).layout(len(panels))},
    }
    for at in (axis(index) for index in range(len(panels))):
        layout |= {f"xaxis{at}": {"anchor": f"y{at}"}, f"yaxis{at}": {"anchor": f"x{at}"}}
    for letter in zoom:
        set_axes(layout, letter, matches=letter)
        del layout[f"{letter}axis"]["matches"]
    patch(layout, wide.layout(len(panels)))
    return layout


def axes(layout: Layout, along: str) -> list[dict[str, Any]]:
    """Return the keys of each panel's axis along `x` or `y`, to be set."""
    return [keys for name, keys in layout.items() if name.startswith(f"{along}axis")]


def set_axes(layout: Layout, along: str, **keys: object) -> None:
    """Set keys of all axes along `x` or `y`."""
    for of_axis in axes(layout, along):
        of_axis |= keys


def on(panel: int) -> dict[str, str]:
    """Return the keys that draw a trace on a panel's axes."""
    return {"xaxis": f"x{axis(panel)}", "yaxis": f"y{axis(panel)}"}


def scatter(panel: int, label: str, hover: str, **keys: object) -> Trace:
    """Return a named trace of dots or lines on a panel; the legend shows only the first panel's."""
    name = plain(label)
    return {
        "type": "scatter",
        **on(panel),
        "name": name,
        "legendgroup": label,
        "showlegend": panel == 0,
        "hovertemplate": f"{hover}<extra>{name}</extra>",
        **keys,
    }


def inside(panel: int) -> dict[str, str]:
    """Return the keys that make an annotation's x and y shares of a panel."""
    return {"xref": f"x{axis(panel)} domain", "yref": f"y{axis(panel)} domain"}


def draw_guide(layout: Layout, panel: int, **at: float) -> None:
    """Draw a dotted line across a panel, at one value of `x` or of `y`."""
    ((across, value),) = at.items()
    along = "y" if across == "x" else "x"
    line = {
        **{f"{across}0": value, f"{across}1": value, f"{along}0": 0, f"{along}1": 1},
        **{f"{across}ref": f"{across}{axis(panel)}"},
        **{f"{along}ref": f"{along}{axis(panel)} domain"},
        "type": "line",
        "line": {"color": ZERO, "width": 1, "dash": "dot"},
    }
    layout.setdefault("shapes", []).append(line)


def patch(layout: Layout, keys: Mapping[str, Any]) -> None:
    """Set layout keys in plotly.js's form, such as `xaxis2.domain` or `annotations[0].text`."""
    for key, value in keys.items():
        *path, last = key.replace("]", "").replace("[", ".").split(".")
        at: Any = layout
        for part in path:
            at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
        at[last] = value


def add_slider(
    layout: Layout,
    layers: Sequence[int],
    panels: int,
    first: int,
    scales: Float[np.ndarray, "layer 2"],
    patches: Sequence[Layout],
) -> None:
    """Add a layer slider below placed panels; traces go by layer, then panel.

    Args:
        layout: the figure's layout.
        layers: the numbers of the layers that its traces show.
        panels: traces per layer.
        first: the place of the layer that is shown first.
        scales: each layer's colour limits.
        patches: each layer's own layout keys, in plotly.js's dotted form.
    """
    steps = []
    for place, layer in enumerate(layers):
        visible = [shown == layer for shown in layers for _ in range(panels)]
        keys = colour_limits(scales[place], "coloraxis.") | patches[place]
        step = {"label": str(layer), "method": "update", "args": [{"visible": visible}, keys]}
        steps.append(step)
    # The margin grows by the slider's height, so that the panels keep their size.
    margin, meta = layout["margin"], layout["meta"]
    inner = layout["height"] - margin["t"] - margin["b"]
    where = {"x": 0, "len": 1, "y": -margin["b"] / inner, "yanchor": "top"}
    look = {"currentvalue": {"prefix": "L"}, "pad": {"t": 0, "b": 0}}
    layout["sliders"] = [{"active": first, "steps": steps, **where, **look}]
    margin["b"] += SLIDER
    layout["height"] += SLIDER
    meta |= {"n_layers": len(layers), "first": first, "patches": patches, "scales": scales.tolist()}


def colour_limits(limits: Iterable[float], prefix: str = "") -> Layout:
    """Return the layout keys of a colour axis from its two limits."""
    low, high = limits
    return {f"{prefix}cmin": float(low), f"{prefix}cmax": float(high)}
