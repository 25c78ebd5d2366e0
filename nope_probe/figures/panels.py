"""Heat maps as all figures draw them, and groups of them side by side in one figure.

A group is a few maps that belong together, such as a published panel, ours and their difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.figures.grid import Extent, Grid, axis, keep, on, patch, place, zoom_together
from nope_probe.figures.style import BLANK, DIVERGING, SEQUENTIAL

WIDTH, GAP = 1050, 0.025
ACROSS = 6  # maps in a row of a wide screen
BAR_DROP, BAR = 30, 58  # from a map to its colour bar, and what the bar needs, px
AXES = 24  # the axes' ticks and title below the last row, px


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heat map of a group.

    Attributes:
        name: its title.
        values: its cells; NaN is left blank.
        low, high: the colour limits.
        unit: the values' unit, as the colour bar and the hover text name it.
        diverging: whether colours centre on zero: `low` is then `-high`.
        positions: how many positions it spans, if it has fewer cells than that.
    """

    name: str
    values: Float[np.ndarray, "query_pos key_pos"]
    low: float
    high: float
    unit: str = "nats"
    diverging: bool = False
    positions: int | None = None

    @property
    def scale(self) -> tuple[float, float, str, bool]:
        """What panels with one colour bar have in common."""
        return self.low, self.high, self.unit, self.diverging


def panel_groups(groups: Sequence[Sequence[Panel]], *, title: str) -> go.Figure:
    """Draw groups of maps side by side; the axes of all maps zoom together.

    Where all groups have the same scales there is one bar for each at the bottom, else each map has
    a bar below it, but for a map on the scale of its neighbour to the left.

    Args:
        groups: the maps, in groups of equal length.
        title: the title.
    """
    panels, size = [panel for group in groups for panel in group], len(groups[0])
    shared = all(
        panel.scale == first.scale
        for group in groups
        for panel, first in zip(group, groups[0], strict=True)
    )
    figure = go.Figure([_heat(panel, index) for index, panel in enumerate(panels)])
    wide, narrow = place_squares(
        figure,
        title,
        [panel.name for panel in panels],
        columns=max(size, size * min(len(groups), ACROSS // size)),
        largest=330,
        row_gap=52 if shared else 52 + BAR,
        bottom=BAR_DROP + BAR + AXES,
        left=50,
        phone={"columns": min(size, 3), "panel": 300 // min(size, 3)},
        nticks=4,
    )
    figure.update_annotations(font={"size": 12})
    for index, panel in enumerate(panels):
        colours = DIVERGING if panel.diverging else SEQUENTIAL
        limits = {"cmin": panel.low, "cmax": panel.high}
        figure.layout[f"coloraxis{axis(index)}"] = {"colorscale": colours, **limits}
    patch(figure, _bars(panels, size, wide, shared))
    few = {f"{xy}axis{axis(i)}.nticks": 3 for i in range(len(panels)) for xy in "xy"}
    bars = _bars(panels, size, narrow, shared)
    keep(figure, narrow={**figure.layout.meta["narrow"], **bars, **few})
    return figure


def _heat(panel: Panel, index: int) -> go.Heatmap:
    cells = panel.values.astype(np.float32)
    span = 1.0 if panel.positions is None else panel.positions / len(cells)
    value, colours = f"%{{z:.3g}} {panel.unit}", f"coloraxis{axis(index)}"
    return heat_map(cells, span, index, name=panel.name, coloraxis=colours, value=value)


def heat_map(
    values: Float[np.ndarray, "query_pos key_pos"],
    span: float,
    panel: int,
    *,
    name: str,
    coloraxis: str,
    value: str,
    label: str = "",
    visible: bool | None = None,
) -> go.Heatmap:
    """Return one map as plotly draws it; cells without a number stay blank.

    Args:
        values: its cells.
        span: positions per cell and axis; above 1 the map is pooled.
        panel: the number of its panel.
        name: its name.
        coloraxis: its colour axis.
        value: what the hover text says of a cell's number.
        label: the title of the hover text; the name by default.
        visible: whether it is shown at first, where a control shows it.
    """
    start, about = (span - 1) / 2, "≈ " if span > 1 else ""
    return go.Heatmap(
        z=values,
        x0=start,
        dx=span,
        y0=start,
        dy=span,
        **on(panel),
        coloraxis=coloraxis,
        name=name,
        visible=visible,
        hoverongaps=False,
        hovertemplate=(
            f"query {about}%{{y:.0f}}<br>key {about}%{{x:.0f}}<br>{value}"
            f"<extra>{label or name}</extra>"
        ),
    )


def place_squares(
    figure: go.Figure,
    title: str,
    names: Sequence[str],
    *,
    columns: int,
    largest: int,
    row_gap: int,
    bottom: int,
    phone: Mapping[str, int],
    left: int = 60,
    **ticks: object,
) -> tuple[Grid, Grid]:
    """Place square maps, with queries downwards, that all zoom and pan together.

    Args:
        figure: the figure of the maps.
        title: its title.
        names: the maps' titles.
        columns: maps in a row.
        largest: the largest side of a map, px.
        row_gap: height between two rows, px.
        bottom: margin, px.
        phone: `columns` and `panel`, the side of a map in px, on a phone.
        left: margin, px.
        ticks: of all axes, as plotly calls them.

    Returns:
        The layouts for a wide and a narrow screen.
    """
    wide = Grid(
        columns=columns,
        panel=int(min(largest, WIDTH * (1 - GAP * (columns - 1)) / columns)),
        gap=GAP,
        shared_y=True,
        x_title="key position",
        y_title="query position",
        row_gap=row_gap,
        bottom=bottom,
        left=left,
    )
    grids = place(figure, title, names, wide, **phone, left=50)
    same = {"constrain": "domain", "showgrid": False, "zeroline": False, **ticks}
    figure.update_xaxes(same)
    figure.update_yaxes(same, autorange="reversed", constraintoward="top")
    zoom_together(figure)
    # All maps are square, since the first is, and match it.
    figure.update_layout(plot_bgcolor=BLANK, yaxis={"scaleanchor": "x"})
    return grids


def bar_below(bar: str, across: Extent, y: float, length: float) -> dict[str, object]:
    """Return the layout keys that centre a colour bar below maps.

    Args:
        bar: the bar, such as `coloraxis2.colorbar`.
        across: the maps' extent along x, as shares of the plotting area.
        y: the bar's upper edge, in the same shares.
        length: the bar's length.
    """
    along = {"x": sum(across) / 2, "xanchor": "center", "len": length, "lenmode": "fraction"}
    down = {"y": y, "yref": "paper", "yanchor": "top", "ypad": 0, "tickangle": 0}
    return {f"{bar}.{key}": value for key, value in {**along, **down}.items()}


def _bars(panels: Sequence[Panel], size: int, grid: Grid, shared: bool) -> dict[str, object]:
    """Return the layout keys of the colour bars: below each scale's first map in its group."""
    keys: dict[str, object] = {}
    domains, inner = grid.domains(len(panels)), grid.inner(len(panels))
    first_of_last_row = (len(panels) - 1) // grid.columns * grid.columns
    for index, panel in enumerate(panels):
        group = index - index % size
        repeats = any(each.scale == panel.scale for each in panels[group:index])
        in_last_row = first_of_last_row <= index < first_of_last_row + size
        bar = f"coloraxis{axis(index)}"
        keys[f"{bar}.showscale"] = shown = not repeats and (in_last_row or not shared)
        if not shown:
            continue
        alike = [
            domains[i][0]
            for i in range(index, group + size)
            if panels[i].scale == panel.scale and domains[i][1] == domains[index][1]
        ]
        drop = (BAR_DROP + (AXES if index >= len(panels) - grid.columns else 0)) / inner
        keys |= _bar(f"{bar}.colorbar", alike, domains[index][1][0] - drop, panel)
    return keys


def _bar(name: str, across: Sequence[Extent], y: float, panel: Panel) -> dict[str, object]:
    extent = across[0][0], across[-1][1]
    ticks = [panel.low, (panel.low + panel.high) / 2, panel.high]
    length = min(0.3, 0.95 * (extent[1] - extent[0]))
    return bar_below(name, extent, y, length) | {
        f"{name}.orientation": "h",
        f"{name}.thickness": 8,
        f"{name}.tickvals": ticks,
        f"{name}.ticktext": [f"{float(f'{tick:.2g}') + 0.0:g}" for tick in ticks],  # + 0.0: no "-0"
        f"{name}.outlinewidth": 0,
        f"{name}.tickfont.size": 11,
        f"{name}.title.text": panel.unit,
        f"{name}.title.side": "bottom",
        f"{name}.title.font.size": 11,
    }
