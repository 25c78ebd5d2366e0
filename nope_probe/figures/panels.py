"""Heat maps in the form of all figures, and groups of maps side by side in a figure.

A group is a few maps that belong together: a model's layers, or a published panel, the reproduced
map and their difference. Maps with more cells than can be drawn are pooled first; see `pool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from nope_probe.errors import UserError
from nope_probe.figures.style import (
    BLANK,
    DIVERGING,
    NOISE_NATS,
    SEQUENTIAL,
    Layout,
    PlotlyTrace,
    axis,
    colour_bar,
    finite,
    panel_axes,
    place_panels,
    plot_height,
)

MAX_POSITIONS = 256
WIDTH, GAP = 1050, 0.025
ACROSS = 6  # maps in a row of a wide screen
BAR_DROP, BAR = 30, 58  # from a map to its colour bar, and the bar's height, px
AXES = 24  # the axes' ticks and title below the last row, px
LEAD_WIDTH, LEAD_GAP = 0.05, 0.02  # of a map: the column of the first key's lead


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heat map of a group.

    Attributes:
        name: its title.
        values: its cells; NaN is left blank.
        low, high: the colour limits.
        unit: the values' unit, as the colour bar and the hover text name it.
        diverging: whether colours centre on zero: `low` is then `-high`.
        span: positions per cell and axis; above 1 the map is pooled.
        leads: the first key's lead in each row, if it is drawn.
    """

    name: str
    values: Float[np.ndarray, "row key_pos"]
    low: float
    high: float
    unit: str = "nats"
    diverging: bool = False
    span: float = 1.0
    leads: Float[np.ndarray, " row"] | None = None

    @property
    def scale(self) -> tuple[float, float, str, bool]:
        """The properties that panels with a common colour bar share."""
        return self.low, self.high, self.unit, self.diverging


def panel_groups(groups: Sequence[Sequence[Panel]], *, title: str) -> go.Figure:
    """Draw groups of maps side by side; the axes of all maps zoom together.

    If all groups have the same scales, every scale has a bar at the bottom. Otherwise every map has
    a bar below it, except a map on the scale of its left neighbour.

    Args:
        groups: the maps, in groups of equal length.
        title: the title.
    """
    panels, size = [panel for group in groups for panel in group], len(groups[0])
    scales = [[panel.scale for panel in group] for group in groups]
    shared = len(groups) > 1 and all(group == scales[0] for group in scales)
    columns = max(size, size * min(len(groups), ACROSS // size))
    names, row_gap = [panel.name for panel in panels], 52 if shared else 52 + BAR + AXES
    figure = place_squares(title, names, columns=columns, row_gap=row_gap)
    figure.update_annotations(font_size=12)
    last_row = (len(panels) - 1) // columns * columns
    for index, panel in enumerate(panels):
        coloraxis, of_leads = (f"coloraxis{axis(i)}" for i in (index, index + len(panels)))
        is_first, bar = _bar(figure, panels, index, columns, size)
        figure.add_traces(heat_map(panel, index, coloraxis, of_leads))
        if panel.leads is not None:
            high = largest_lead(groups[index // size])
            leads = {"colorscale": DIVERGING, "cmin": -high, "cmax": high, "showscale": False}
            figure.update_layout({of_leads: leads})
            bar["title"]["text"] += f"; first key's lead to ±{high:.2g}"
        has_bar = is_first and (not shared or last_row <= index < last_row + size)
        scale = DIVERGING if panel.diverging else SEQUENTIAL
        limits = {"cmin": panel.low, "cmax": panel.high, "colorscale": scale}
        figure.update_layout({coloraxis: limits | {"showscale": has_bar, "colorbar": bar}})
    return figure


def largest_lead(group: Sequence[Panel]) -> float:
    """Return the largest lead of a group's maps, at which the colours of its leads end, nats."""
    leads = [panel.leads for panel in group if panel.leads is not None]
    return float(np.abs(finite(leads)).max(initial=NOISE_NATS))


def heat_map(
    panel: Panel,
    place: int,
    coloraxis: str = "coloraxis",
    leads_axis: str = "coloraxis2",
    visible: bool | None = None,
) -> list[PlotlyTrace]:
    """Return a map as a plotly heat map, and the first key's lead as a strip left of it.

    Cells without a number stay blank. A gap is between the strip and the other keys.

    Args:
        panel: the map; with leads, the first keys have no cells.
        place: the number of its panel in the figure.
        coloraxis: its colour axis.
        leads_axis: that of the leads.
        visible: whether the map is shown before any use of a control.
    """
    values, span = panel.values, panel.span
    start, about = (span - 1) / 2, "≈ " if span > 1 else ""
    of = f", mean of {span:.2g} × {span:.2g}" if span > 1 else ""
    value = f"%{{z:.3g}} {panel.unit}{of}"
    hover = f"query {about}%{{y:.0f}}<br>KEY<br>{value}<extra>{panel.name}</extra>"
    of_map: PlotlyTrace = {
        "type": "heatmap",
        "z": values,
        "x0": start,
        "dx": span,
        "y0": start,
        "dy": span,
        **panel_axes(place),
        "coloraxis": coloraxis,
        "name": panel.name,
        "visible": visible,
        "hoverongaps": False,
        "hovertemplate": hover.replace("KEY", f"key {about}%{{x:.0f}}"),
    }
    if panel.leads is None:
        return [of_map]
    first = int(np.isnan(values).all(0).argmin())  # the first keys' cells are blank
    column, wide = panel.leads[:, None].astype(np.float32), span * values.shape[1]
    right = span * first - 0.5 - wide * LEAD_GAP
    of_leads = {
        "z": column,
        "coloraxis": leads_axis,
        "x0": right - wide * LEAD_WIDTH / 2,
        "dx": wide * LEAD_WIDTH,
        "hovertemplate": hover.replace("KEY", "first key's lead"),
    }
    return [of_map, of_map | of_leads]


def place_squares(title: str, names: Sequence[str], *, columns: int, row_gap: int) -> go.Figure:
    """Return empty panels of square maps, with queries downwards; all zoom and pan together.

    Args:
        title: the figure's title.
        names: the maps' titles.
        columns: maps in a row.
        row_gap: height between two rows, px.
    """
    largest = 400 if len(names) == 1 else 330
    figure = place_panels(
        title,
        names,
        zoom="xy",
        columns=columns,
        panel=int(min(largest, WIDTH * (1 - GAP * (columns - 1)) / columns)),
        gap=GAP,
        shared_y=True,
        x_title="key position",
        y_title="query position",
        row_gap=row_gap,
        bottom=BAR_DROP + BAR + AXES,
    )
    same = {"constrain": "domain", "showgrid": False, "zeroline": False}
    same["nticks"] = 4 if columns > 2 else None
    figure.update_xaxes(same)
    figure.update_yaxes(same, autorange="reversed", constraintoward="top")
    # All maps are square, because they match the first, which is square.
    return figure.update_layout(yaxis={"scaleanchor": "x"}, plot_bgcolor=BLANK)


def _bar(
    figure: go.Figure, panels: Sequence[Panel], index: int, columns: int, size: int
) -> tuple[bool, Layout]:
    """Return whether a panel is the first on its scale in its row, and the bar below these."""
    start = index - index % size
    alike = [
        other
        for other in range(start, start + size)
        if panels[other].scale == panels[index].scale and other // columns == index // columns
    ]
    bottom = figure.layout[f"yaxis{axis(index)}"].domain[0]
    left = figure.layout[f"xaxis{axis(index)}"].domain[0]
    right = figure.layout[f"xaxis{axis(alike[-1])}"].domain[1]
    length = min(0.3, 0.8 * (right - left))
    across = (left + right - length) / 2, (left + right + length) / 2
    below = bottom - (BAR_DROP + AXES) / plot_height(figure)
    low, high = panels[index].low, panels[index].high
    bar = {**colour_bar(panels[index].unit, across, below), **_ticks(low, high)}
    return index == alike[0], bar


def _ticks(low: float, high: float) -> dict[str, list[object]]:
    """Return the ticks of a colour bar at its ends and middle, with two digits of its span."""
    at = [low, (low + high) / 2, high]
    digits = 1 - floor(log10(high - low)) if high > low else 2
    return {"tickvals": [*at], "ticktext": [f"{round(tick, digits) + 0.0:g}" for tick in at]}


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMaps:
    """Maps that have the rows of some queries alone, as a run of long sequences keeps them.

    Attributes:
        values: nats (or the unit of the maps); NaN where there is no number.
        queries: the queries of the rows; all by default.
        skip_keys: how many keys count as first; without any, patterns have no lead.
        block: positions per cell and axis; above 1 for pooled maps.
        leads: of pooled patterns, the first key's lead in each row, nats; the keys that count as
            first then have no cells.
    """

    values: Float[np.ndarray, "*map row key_pos"]
    queries: Int[np.ndarray, " row"] | None = None
    skip_keys: int = 0
    block: int = 1
    leads: Float[np.ndarray, "layer row"] | None = None

    def panel(self, layer: int, name: str, **about: Any) -> Panel:
        """Return the map at a place among the layers as a panel.

        Args:
            layer: the place.
            name: of the panel.
            about: its other attributes.
        """
        leads = None if self.leads is None else self.leads[layer]
        values = self.values[layer]
        return Panel(name=name, values=values, span=float(self.block), leads=leads, **about)


def pool(maps: RowMaps, max_positions: int, with_leads: bool = False) -> RowMaps:
    """Return the means of square blocks of cells, so that no axis is longer than max_positions.

    A block's mean leaves out cells without a number, such as those above the diagonal, and queries
    without a row. The last block may be smaller.

    Args:
        maps: maps, in nats or another unit.
        max_positions: how many cells an axis has at most.
        with_leads: whether the maps are patterns, with the first key's lead in their first columns.

    Raises:
        UserError: if max_positions is below 1.

    Example:
        >>> two_rows = np.array([[[1.0, 3.0, np.nan, np.nan], [5.0, 7.0, 9.0, 9.0]]])
        >>> pool(RowMaps(values=two_rows, queries=np.array([1, 3])), 2).values.tolist()
        [[[2.0, nan], [6.0, 9.0]]]
    """
    if max_positions < 1:
        raise UserError(f"expected at least 1 position, got {max_positions}")
    cells, skip_keys = maps.values, maps.skip_keys
    if with_leads and skip_keys and maps.leads is None:
        leads = np.repeat(cells[..., :skip_keys].mean(-1, keepdims=True), cells.shape[-1], -1)
        others = np.where(np.arange(cells.shape[-1]) < skip_keys, np.nan, cells)
        of_leads = pool(replace(maps, values=leads), max_positions).values[..., 0]
        return replace(pool(replace(maps, values=others), max_positions), leads=of_leads)
    n_rows, n = cells.shape[-2:]
    block = -(-n // max_positions)
    queries = np.arange(n_rows) if maps.queries is None else maps.queries
    if block == 1 and n_rows == n:
        return replace(maps, values=cells.astype(np.float32), queries=None)
    means = np.stack([_block_means(values, block, queries) for values in cells])
    return replace(maps, values=means.astype(np.float32), queries=None, block=block)


def _block_means(
    cells: Float[np.ndarray, "row key_pos"], block: int, queries: Int[np.ndarray, " row"]
) -> Float[np.ndarray, "query_block key_block"]:
    known = np.isfinite(cells)
    sums = _block_sums(np.where(known, cells, np.float32(0)), block, queries)
    counts = _block_sums(known.astype(np.float32), block, queries)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _block_sums(
    cells: Float[np.ndarray, "row key_pos"], block: int, queries: Int[np.ndarray, " row"]
) -> Float[np.ndarray, "query_block key_block"]:
    n = cells.shape[1]
    filled, starts = np.unique(queries // block, return_index=True)
    sums = np.zeros((-(-n // block), n), cells.dtype)
    sums[filled] = np.add.reduceat(cells, starts, axis=0)
    return np.add.reduceat(sums, np.arange(0, n, block), axis=1)
