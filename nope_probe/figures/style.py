"""The look of all figures: colours, the template, panels, and limits in which noise is flat.

On dark screens, pages replace the colours of ON_DARK. A figure is laid out for a wide screen; on a
narrow one the report page scrolls it in a box. Layouts and traces are plain dictionaries of
plotly.js, which `go.Figure` validates once, at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
from jaxtyping import Float
from plotly.colors import sequential
from plotly.subplots import make_subplots

from nope_probe.figures.names import plain
from nope_probe.removal import INK

Layout: TypeAlias = dict[str, Any]
PlotlyTrace: TypeAlias = dict[str, Any]
SLIDER = 84  # px of a slider, with its value above and its labels below
GRID, BLANK, ZERO = "#d9dce1", "#eceef1", "#8b949e"
TOP = 64  # px of the margin above the panels, with the figure's title
TITLE_HEIGHT = 16  # px of a figure's title in the top margin
# Signed values, blue to red (ColorBrewer's RdBu): zero is light on paper, and dark on dark screens.
_SIGNED = "#053061 #2166ac #4393c3 #92c5de #d1e5f0 #f7f7f7 #fddbc7 #f4a582 #d6604d #b2182b #67001f"
_DARK = "#a9d8fb #6cb6ee #4190d0 #2d689b #1e4361 #16191d #592a23 #913f30 #c95d43 #ee8b6b #fdc5ab"
STOPS = {  # in the form that the script of a text reads
    "sequential": list(sequential.Viridis),
    "diverging": _SIGNED.split(),
    "divergingOnDark": _DARK.split(),
}
ColourScale = str | list[tuple[float, str]]
SEQUENTIAL: ColourScale = "Viridis"
DIVERGING: ColourScale = [(index / 10, stop) for index, stop in enumerate(STOPS["diverging"])]
ON_DARK = {INK: "#e8eaed", GRID: "#3a4048", BLANK: "#262b32"}
ON_DARK |= dict(zip(STOPS["diverging"], STOPS["divergingOnDark"], strict=True))
GUIDE = {"color": ZERO, "width": 1, "dash": "dot"}  # a line at one value, across a panel
TICKS = {"exponentformat": "power", "minexponent": 4}  # no "200n", no "50k"
_AXIS = {
    **TICKS,  # else 2e-7 nats are written 200n
    "gridcolor": GRID,
    "zerolinecolor": ZERO,
    "linecolor": GRID,
    "title": {"standoff": 8, "font": {"size": 13}},
    "automargin": True,
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
# A map or curve is noise if it spans less than this many standard errors, or nats (the resolution
# of scores in float32). Its colours or axis then span this many times as much.
NOISE_ERRORS, NOISE_NATS, WIDER = 8, 1e-5, 10
PALE = 3  # standard errors of a cell that signed colours span at least
FLOOR = 0.01  # nats, or a share: attention weights change by 1% per hundredth of a nat
MARGIN = 3.0  # half an axis, in units of the largest noise
FLAT = "<br>flat: within noise"  # under a panel's title
FLAT_WORDS = ": flat, within noise"  # after a panel's title
Numbers = Float[np.ndarray, "..."] | Sequence[float]


class KeptFigure(go.Figure):
    """A figure that Jupyter shows, and that a page keeps which nbconvert writes of the notebook.

    Attributes:
        by_layer: of a figure with a slider, the panels of each layer, by the layer's name.
    """

    by_layer: Mapping[str, Sequence[Any]] = {}

    def _ipython_display_(self) -> None:
        if pio.renderers.default != "plotly_mimetype":  # Jupyter's, of which nbconvert shows none
            super()._ipython_display_()
            return
        html = self.to_html(full_html=False, include_plotlyjs="cdn")
        display = import_module("IPython.display").display
        display({**self._repr_mimebundle_(), "text/html": html}, raw=True)


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


def colour_axis(limits: tuple[float, float], unit: str, **bar: object) -> Layout:
    """Return a figure's colour axis, whose scale diverges if the lower limit is negative.

    Args:
        limits: the colour limits.
        unit: the title of its colour bar.
        bar: further keys of the bar, by plotly's names.
    """
    scale = DIVERGING if limits[0] < 0 else SEQUENTIAL
    bar = {**colour_bar(unit), **bar}
    return {"colorscale": scale, "cmin": limits[0], "cmax": limits[1], "colorbar": bar}


def axis(panel: int) -> str:
    """Return plotly's suffix for a panel's axes: empty for the first, then 2, 3, ...

    Example:
        >>> axis(0), axis(1)
        ('', '2')
    """
    return "" if panel == 0 else str(panel + 1)


def place_panels(
    title: str,
    names: Sequence[str],
    *,
    panel: int,
    zoom: str = "",
    columns: int = 1,
    gap: float = 0.08,
    row_gap: int = 60,
    bottom: int = 84,
    x_title: str = "",
    y_title: str = "",
    shared_y: bool = False,
) -> go.Figure:
    """Return a figure of empty panels of one size.

    Args:
        title: the figure's title.
        names: the panels' titles.
        panel: height of a panel, px.
        zoom: `x`, `y` or `xy`, the axes that all panels share.
        columns: panels in a row.
        gap: width between two panels in a row, as a share of the plotting area.
        row_gap: height between two rows, for titles and ticks, px.
        bottom: the margin that has the legend or colour bar, px.
        x_title: the title of each column's lowest x axis; empty for none.
        y_title: the title of each row's first y axis; empty for none.
        shared_y: whether the panels of a row share the ticks of the first panel.
    """
    names = names or [""]
    n, starts = len(names), range(0, len(names), columns)
    inner = panel * len(starts) + row_gap * (len(starts) - 1)
    figure = make_subplots(
        len(starts),
        columns,
        specs=[[{} if at + i < n else None for i in range(columns)] for at in starts],
        horizontal_spacing=gap,
        vertical_spacing=min(1.0, row_gap / inner),
        subplot_titles=[name or " " for name in names],
        figure=KeptFigure(),
    )
    axes = zip(figure.select_xaxes(), figure.select_yaxes(), strict=True)
    for index, (x, y) in enumerate(axes):
        x.title.text = x_title if index + columns >= n else ""
        is_first = index % columns == 0
        y.update(title_text=y_title if is_first else "", showticklabels=is_first or not shared_y)
    margin = {"t": TOP, "b": bottom, "l": 16, "r": 12}
    figure.update_layout(
        title_text=title, height=inner + TOP + bottom, margin=margin, template=TEMPLATE
    )
    for letter in zoom:
        figure.update_layout({f"{letter}axis{axis(i)}_matches": letter for i in range(1, n)})
    return figure.update_annotations(font_size=13)


def draw_panels(
    title: str, panels: Mapping[str, Sequence[PlotlyTrace]], **places: Any
) -> go.Figure:
    """Return a figure of panels by their titles; the legend has every name once.

    Args:
        title: the figure's title.
        panels: the traces of each panel.
        places: the other arguments of `place_panels`.
    """
    traces, named = list[PlotlyTrace](), set[str]()
    for index, of_panel in enumerate(panels.values()):
        for trace in of_panel:
            drawn = trace | panel_axes(index)
            if "name" in trace:
                drawn["showlegend"] = trace.get("showlegend", trace["name"] not in named)
                named |= {trace["name"]} if drawn["showlegend"] else set()
            traces.append(drawn)
    return place_panels(title, [*panels], **places).add_traces(traces)


def panel_axes(panel: int) -> dict[str, str]:
    """Return the keys that draw a trace on a panel's axes."""
    return {"xaxis": f"x{axis(panel)}", "yaxis": f"y{axis(panel)}"}


def scatter(label: str, hover: str, **keys: object) -> PlotlyTrace:
    """Return a named trace of dots or lines."""
    name = plain(label)
    return {
        "type": "scatter",
        "name": name,
        "legendgroup": label,
        "hovertemplate": f"{hover}<extra>{name}</extra>",
        **keys,
    }


def error_bars(values: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> Layout:
    """Return plotly's error bars between the bounds of estimates."""
    arms = {"array": highs - values, "arrayminus": values - lows}
    return {"type": "data", "symmetric": False, **arms, "thickness": 1.5, "width": 3}


def curve_in_band(
    x: np.ndarray,
    estimates: Float[np.ndarray, "3 x"],
    *,
    label: str,
    hover: str,
    line: Mapping[str, object],
    **others: object,
) -> list[PlotlyTrace]:
    """Return estimates as a curve, and the band between their bounds.

    Args:
        x: the curve's places along x.
        estimates: estimates, lower and upper bounds.
        label: the name in the legend.
        hover: the hover text.
        line: its colour, width and dash.
        others: further keys of the curve, by plotly's names.
    """
    values, lows, highs = estimates
    band = {
        "type": "scatter",
        "x": np.concatenate([x, x[::-1]]),
        "y": np.concatenate([highs, lows[::-1]]),
        "fill": "toself",
        "mode": "none",
        "fillcolor": line["color"],
        "opacity": 0.2,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": label,
    }
    curve = {"x": x, "y": values, "customdata": estimates[1:].T, "mode": "lines", "line": line}
    return [band, scatter(label, hover, **curve | others)]


def plot_height(figure: go.Figure) -> float:
    """Return the height of a figure's plotting area, px."""
    layout = figure.layout
    return float(layout.height - layout.margin.t - layout.margin.b)


def finite(values: Numbers | Sequence[Numbers]) -> Float[np.ndarray, " number"]:
    """Return the numbers that are finite, without their shape."""
    numbers = np.asarray(values, float)
    return numbers[np.isfinite(numbers)]


def reach_of(values: Numbers) -> float:
    """Return the largest absolute value of the finite numbers, at least `FLOOR`."""
    return max(FLOOR, float(np.abs(finite(values)).max(initial=0.0)))


def is_noise(values: Numbers, lows: Numbers, highs: Numbers) -> bool:
    """Return whether there are numbers, all with intervals that include zero."""
    known = np.isfinite(np.asarray(values, float))
    clear = (np.asarray(lows, float) > 0) | (np.asarray(highs, float) < 0)
    return bool(known.any()) and not bool((known & clear).any())


def axis_range(values: Numbers, lows: Numbers, highs: Numbers) -> tuple[float, float] | None:
    """Return the range of an axis with zero, or None if the numbers themselves give a good range.

    Numbers within their noise fill a third of the axis around zero, and no axis spans less than
    `FLOOR`.

    Args:
        values: estimates; NaN without an estimate.
        lows: lower bounds.
        highs: upper bounds.

    Example:
        >>> axis_range([2e-7, -1e-7], [-2e-7, -3e-7], [4e-7, 1e-7])
        (-0.01, 0.01)
        >>> axis_range([0.5, -0.2], [-0.3, -0.7], [1.0, 0.3])
        (-3.0, 3.0)
        >>> axis_range([0.5], [0.4], [0.6]) is None
        True
    """
    known = finite([values, lows, highs])
    largest = float(np.abs(known).max(initial=0.0))
    if not known.size:
        return None
    if is_noise(values, lows, highs):
        top = max(MARGIN * largest, FLOOR)
        return -top, top
    return (0.0 if known.min() >= 0 else -FLOOR, FLOOR) if largest < FLOOR else None


def padded_range(ends: Numbers) -> tuple[float, float] | None:
    """Return an axis's range from zero to all numbers and a twentieth more; None without numbers.

    Example:
        >>> padded_range([0.5, 2.0, np.nan]), padded_range([np.nan])
        ((0.0, 2.1), None)
    """
    known = finite(ends)
    if not known.size:
        return None
    low, high = min(0.0, float(known.min())), max(0.0, float(known.max()))
    pad = 0.05 * (high - low)
    return (low - pad if low < 0 else 0.0), (high + pad if high > 0 else 0.0)


def widened(low: float, high: float, floor: float = NOISE_NATS) -> tuple[float, float, bool]:
    """Return limits, widened if they differ by less than `floor`, and whether they were widened.

    Example:
        >>> widened(1.0, 3.0, floor=1.0)
        (1.0, 3.0, False)
        >>> widened(2.0, 2.0, floor=1.0)
        (-3.0, 7.0, True)
    """
    if high - low >= floor:
        return low, high, False
    centre, half = (low + high) / 2, WIDER * floor / 2
    return centre - half, centre + half, True


def percentiles(values: Float[np.ndarray, "..."], at: Sequence[float]) -> Float[np.ndarray, " at"]:
    """Return percentiles of the finite values, 0 without finite values."""
    known = values[np.isfinite(values)]
    return np.percentile(known, at) if known.size else np.zeros(len(at))


def flattened(tops: Sequence[float], flat: Collection[int]) -> list[float]:
    """Return the reach of each layer's limits around zero; flat layers get that of the strongest.

    Example:
        >>> flattened([1e-7, 2.0, 3.0], flat=[0])
        [3.0, 2.0, 3.0]
    """
    clear = [top for layer, top in enumerate(tops) if layer not in flat]
    widest = max([FLOOR, *clear])
    return [max(top, widest) if layer in flat else top for layer, top in enumerate(tops)]
