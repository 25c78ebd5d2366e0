"""A table with intervals -> plotly figure, as a view of it is declared: dots, curves or cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import qualitative, sample_colorscale

from nope_probe.figures.names import TABLE, named, parts_of, row_name, words_of
from nope_probe.figures.style import (
    BLANK,
    FLAT,
    GRID,
    GUIDE,
    SEQUENTIAL,
    Layout,
    PlotlyTrace,
    axis,
    axis_range,
    colour_axis,
    curve_in_band,
    draw_panels,
    error_bars,
    is_noise,
    padded_range,
    reach_of,
    scatter,
)
from nope_probe.figures.words import (
    BOTH_WAYS,
    PLACES,
    SHARE,
    Column,
    Columns,
    View,
    above_noise,
    bound_columns,
    estimates_of,
)
from nope_probe.removal import INK, NO_REPLACEMENT

SPREAD = 0.6  # width of the dots of a layer or another value of x
MOST_TICKS = 12  # of layers
LEGEND_ROW = 26  # px; of six names
CELL, MOST = 26, 1400  # px: a row of cells at most, and all rows of a panel
BOUNDS = "(%{customdata[0]:.3g} to %{customdata[1]:.3g})"  # in hover texts
PERCENT = BOUNDS.replace(".3g", ".1%")  # where the axis is in percent
NOTE = {"bgcolor": BLANK, "showarrow": False, "font": {"size": 11}}
DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "x", "cross", "star")


def is_drawn(view: View, table: pd.DataFrame) -> bool:
    """Return whether a table has a number that the view draws."""
    return any(name in table and table[name].notna().any() for name in _flat(view.y))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of a view: its rows, and the columns that are drawn.

    Attributes:
        about: the number on its axis.
        rows: of the table.
        ys: the columns of numbers, with bounds.
    """

    about: Column
    title: str
    rows: pd.DataFrame
    ys: tuple[str, ...]

    @property
    def ends(self) -> np.ndarray:
        """Estimates, lower and upper bounds of all numbers, [3, number]."""
        return np.concatenate([estimates_of(self.rows, name) for name in self.ys], axis=1)


def panels_of(view: View, table: pd.DataFrame, columns: Columns) -> list[Panel]:
    """Return the panels of a view that have a number, by values of `panels`, then by y."""
    known = {**PLACES, **columns}
    groups = table.groupby(view.panels, sort=False) if view.panels else [("", table)]
    panels = []
    for value, rows in groups:
        for y in view.y:
            ys = tuple(name for name in _flat((y,)) if name in rows and rows[name].notna().any())
            if not ys:
                continue
            number = known.get(ys[0], Column(ys[0]))
            about = number if str(value) in view.names else columns.get(str(value), number)
            title = about.title
            if view.panels and about is number:
                name = named(view.names, view.panels, value)
                title = f"{name}, {number.title if len(view.y) > 1 else number.shown_unit}"
            panels.append(Panel(about=about, title=title.strip(", "), rows=rows, ys=ys))
    return panels


def draw(
    view: View,
    table: pd.DataFrame,
    columns: Columns,
    marks: Mapping[str, int] | None = None,
) -> go.Figure:
    """Draw a table as a view says: series of dots, rows, lines or curves, or cells.

    Args:
        view: what is drawn.
        table: the rows that are drawn, with a column and its two bounds for each number.
        columns: the study's numbers.
        marks: named places on x, drawn as vertical lines.
    """
    if view.kind == "rows":  # a row without a number in any panel is left out
        table = table[table[[*_flat(view.y)]].notna().any(axis=1)]
    panels = panels_of(view, above_noise(table, columns), columns)
    if view.kind == "cells":
        return _draw_cells(view, panels)
    looks = _looks(view, table)
    traces: dict[str, list[PlotlyTrace]] = {}
    for panel in panels:
        is_flat = view.kind in ("dots", "rows") and is_noise(*panel.ends)
        traces[panel.title + FLAT * is_flat] = [
            *_series(view, panel, looks),
            *_marks(panel, table[view.x], marks or {}),
        ]
    n_names = len({trace["name"] for of in traces.values() for trace in of if "name" in trace})
    n_x, is_down = table[view.x].nunique(), view.kind == "rows"
    wide = n_x > MOST_TICKS and view.kind in ("dots", "lines")
    across = min(max(1, view.across // 2) if wide else view.across, len(panels))
    figure = draw_panels(
        view.title,
        traces,
        columns=across,
        panel=max(120, 22 * n_x) if is_down else 170 if len(panels) > 2 else 260,
        zoom="y" if is_down else "x",
        shared_y=is_down,
        row_gap=86 if is_down else 60,
        x_title="" if is_down else columns.get(view.x, PLACES.get(view.x, Column(view.x))).label,
        bottom=60 + LEGEND_ROW * -(-n_names // 5),
    )
    _place_x(figure, view, table)
    _scale_numbers(figure, view, panels, across)
    return _with_button(figure, view)


def _with_button(figure: go.Figure, view: View) -> go.Figure:
    """Add the button that shows the series of `later`, and hides them again."""
    later = [place for place, trace in enumerate(figure.data) if trace.visible is False]
    if later:
        shown, hidden = ([{"visible": on}, later] for on in (True, False))
        button = {"label": view.button, "method": "restyle", "args": shown, "args2": hidden}
        look = {"bgcolor": BLANK, "bordercolor": GRID, "pad": {"b": 12}}
        where = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
        menu = {"type": "buttons", "active": -1, "buttons": [button], **look, **where}
        figure.update_layout(updatemenus=[menu])
    return figure


def _series(view: View, panel: Panel, looks: Mapping[str, Layout]) -> Iterator[PlotlyTrace]:
    """Yield the traces of a panel's series: rows that share colour, dash and name."""
    groups = (
        panel.rows.groupby([*view.by], sort=False, dropna=False) if view.by else [((), panel.rows)]
    )
    found = [
        (values, y, rows) for values, rows in groups for y in panel.ys if rows[y].notna().any()
    ]
    # What replaces weights is dashed, and its markers are open.
    last = [*dict.fromkeys(panel.rows[view.by[-1]])] if len(view.by) > 1 else []
    last.sort(key=lambda value: value != NO_REPLACEMENT)
    for place, (values, y, rows) in enumerate(found):
        yield from _traces(
            view,
            rows,
            y,
            panel.about,
            label=_label(view, panel, values, y),
            look=looks[str(values[0]) if values else ""],
            nth=int(y != panel.ys[0]) + (last.index(values[-1]) if last else 0),
            offset=(place + 0.5) / len(found) - 0.5,
        )


def _looks(view: View, table: pd.DataFrame) -> dict[str, Layout]:
    """Return colour and symbol of each value of the first of `by`: a component's, or the next."""
    if not view.by:
        return {"": {"color": INK, "symbol": "circle"}}
    values = [*dict.fromkeys(table[view.by[0]])]
    others = zip(cycle(qualitative.Dark24), cycle(MARKERS), strict=False)
    if view.by[0] == "layer":  # from dark to light with depth
        shades = np.linspace(0.05, 0.85, max(2, len(values))).tolist()
        others = zip(sample_colorscale(SEQUENTIAL, shades), cycle(MARKERS[:1]), strict=False)
    looks = {}
    for name in map(str, values):
        of = words_of(name)
        is_known = name in TABLE or parts_of(name)[0] or of.colour != INK
        ink, shape = (of.colour, of.marker) if is_known else next(others)
        looks[name] = {"color": ink, "symbol": shape}
    return looks


def _traces(
    view: View,
    rows: pd.DataFrame,
    y: str,
    about: Column,
    *,
    label: str,
    look: Layout,
    nth: int,
    offset: float,
) -> list[PlotlyTrace]:
    """Return the traces of a series.

    Args:
        view: what is drawn.
        rows: of the table.
        y: the column that is drawn.
        about: that of the panel's axis.
        label: the name of the series.
        look: its colour and symbol.
        nth: its dash, and whether its markers are open: above 0.
        offset: the place of its dots among those of the same x, from -1/2 to 1/2.
    """
    at, share = rows[view.x], about.is_share
    shown = f"%{{{'x' if view.kind == 'rows' else 'y'}:{'.1%' if share else '.3g'}}}"
    hover = f"{shown} {about.shown_unit} {PERCENT if share else BOUNDS}".replace("  ", " ")
    hover = hover if view.kind == "rows" else f"%{{text}}: {hover}"
    texts = [named(view.names, view.x, value) for value in at]
    ends = estimates_of(rows, y)
    marker = look | {"symbol": f"{look['symbol']}{'-open' * (nth > 0)}", "size": 8}
    line = {"color": look["color"], "width": 2, "dash": DASHES[nth % len(DASHES)]}
    if view.kind == "curves" and len(rows) > 1:  # a curve of one place is a dot
        last = f"last_{view.x}"  # of each bin
        x = (at + rows[last]) / 2 if last in rows else at
        return curve_in_band(x.to_numpy(), ends, label=label, hover=hover, line=line, text=texts)
    keys = {"customdata": ends[1:].T, "text": texts, "mode": "markers", "cliponaxis": False}
    if view.kind == "lines":
        hollow = (ends[1] <= 0) & (ends[2] >= 0)
        symbols = [f"{look['symbol']}{'-open' * is_hollow}" for is_hollow in hollow.tolist()]
        marker["symbol"] = symbols
        keys |= {"x": at.tolist(), "y": ends[0], "mode": "lines+markers", "line": line}
        keys |= {"error_y": error_bars(*ends) | {"thickness": 1, "width": 0}}
        if view.later and len(rows.query(view.later)):
            keys["visible"] = False
    elif view.kind == "rows":
        keys |= {"x": ends[0], "y": texts, "error_x": error_bars(*ends)}
    else:
        marker["size"] = 9 if at.nunique() <= MOST_TICKS else 6
        is_layer = view.x == "layer"
        places = at.to_numpy(float) + SPREAD * offset if is_layer else at.tolist()
        keys |= {"x": places, "y": ends[0], "error_y": error_bars(*ends)}
    return [scatter(label, hover, marker=marker, **keys)]


def _label(view: View, panel: Panel, values: Sequence[Any], y: str) -> str:
    """Return the name of a series in the legend; what rows are of has one name everywhere."""
    by = dict(zip(view.by, values, strict=True))
    parts, replacement = [], str(by.pop("replacement", NO_REPLACEMENT))
    for name, value in by.items():
        if name == "removed" and str(value) not in view.names:
            parts.append(row_name(str(value), replacement))
        else:
            parts.append(named(view.names, name, value))
    parts += [y.replace("_", " ")] if len(panel.ys) > 1 else []
    return ", ".join(filter(None, parts)) or panel.about.label


def _marks(panel: Panel, x: pd.Series, marks: Mapping[str, int]) -> list[PlotlyTrace]:
    """Return vertical lines at the named places that x reaches, as traces for the legend."""
    _, lows, highs = panel.ends
    reach = [min(0.0, float(np.nanmin(lows))), float(np.nanmax(highs))]
    look, dashes = {"y": reach, "mode": "lines"}, [{"dash": dash} for dash in DASHES[1:]]
    reached = {name: place for name, place in marks.items() if place <= x.max()}
    return [
        scatter(f"{name} ({place:,.0f})", "", x=[place] * 2, **look, line=GUIDE | dash)
        for (name, place), dash in zip(reached.items(), cycle(dashes), strict=False)
    ]


def _place_x(figure: go.Figure, view: View, table: pd.DataFrame) -> None:
    """Set the axis of x: a tick for each layer, logarithmic bins, categories in their order."""
    if view.kind == "rows":
        names = [named(view.names, view.x, value) for value in dict.fromkeys(table[view.x])]
        figure.update_yaxes(categoryarray=names[::-1], range=[-0.5, len(names) - 0.5])
        figure.update_layout(showlegend=len(view.by) > 0 and view.by[0] != view.x)
    elif view.x == "layer":
        layers = sorted({*table["layer"].astype(int)})
        figure.update_xaxes(
            range=[layers[0] - 0.5, layers[-1] + 0.5],
            showgrid=False,
            zeroline=False,
            tick0=0,
            dtick=-(-len(layers) // MOST_TICKS),
            minor={"tick0": 0.5, "dtick": 1, "showgrid": True, "gridcolor": GRID},
        )
    elif view.scale == "log":
        places = sorted({*table[view.x].tolist()})  # a number of heads is whole
        places = places[:: -(-len(places) // MOST_TICKS)]
        names = [named(view.names, view.x, x) for x in places]
        figure.update_xaxes(type="log", tickvals=places, ticktext=names)
    elif not pd.api.types.is_numeric_dtype(table[view.x]):
        texts = {str(value): named(view.names, view.x, value) for value in table[view.x]}
        ticks = {"tickvals": [*texts], "ticktext": [*texts.values()]}
        figure.update_xaxes(type="category", categoryarray=[*texts], **ticks)


def _scale_numbers(figure: go.Figure, view: View, panels: Sequence[Panel], columns: int) -> None:
    """Set the axes of numbers: zero in sight, noise flat, percents, neutral lines, blanks."""
    along = "x" if view.kind == "rows" else "y"
    for place, panel in enumerate(panels):
        numbers = figure.layout[f"{along}axis{axis(place)}"]
        numbers.update(zerolinewidth=2, nticks=6 if along == "x" else 5)
        if panel.about.is_share:
            numbers.tickformat = ".0%"
        where = {"row": 1 + place // columns, "col": 1 + place % columns}
        if panel.about.neutral is not None:
            across = figure.add_vline if along == "x" else figure.add_hline
            across(panel.about.neutral, line=GUIDE, layer="below", **where)
        if view.kind != "curves":
            numbers.rangemode = "tozero"
        if view.kind == "dots" and view.x == "layer" and panel.about.blank:
            known = panel.rows.groupby("layer")[panel.ys[0]].count()
            note = {**NOTE, "text": panel.about.blank, "textangle": -90, "y": 0.5}
            for layer in known.index[known == 0]:
                figure.add_annotation(**note, **where, x=layer, yref="y domain")
    _fit_axes(figure, view, panels, along)


def _fit_axes(figure: go.Figure, view: View, panels: Sequence[Panel], along: str) -> None:
    """Match the axes of panels that share a scale, and keep noise of dots flat."""
    alike: dict[str, list[int]] = {}
    for place, panel in enumerate(panels):
        alike.setdefault(panel.about.unit if view.same_scale else str(place), []).append(place)
    for first, *others in alike.values():
        estimates = np.concatenate([panels[place].ends for place in (first, *others)], axis=1)
        limits = axis_range(*estimates) if view.kind in ("dots", "rows") else None
        if limits is None and others:  # plotly.js scales a panel without numbers itself
            limits = padded_range(estimates)
        for place in (first, *others):
            matched = f"{along}{axis(first)}" if place in others else None
            figure.layout[f"{along}axis{axis(place)}"].update(matches=matched, range=limits)


def _draw_cells(view: View, panels: Sequence[Panel]) -> go.Figure:
    """Draw a heat map for each panel, all in the colours of one scale."""
    [by], about = view.by, panels[0].about
    traces = {panel.title: _cells(view, panel) for panel in panels}
    n_rows = max(panel.rows[by].nunique() for panel in panels)
    figure = draw_panels(
        view.title,
        traces,
        columns=min(view.across, len(panels)),
        panel=max(160, int(min(CELL, MOST / n_rows) * n_rows)),
        gap=0.04 if pd.api.types.is_numeric_dtype(panels[0].rows[by]) else 0.1,
        bottom=124,
        x_title=PLACES.get(view.x, Column(view.x)).label,
        y_title=PLACES.get(by, Column(by)).label,
    )
    is_bounded = about.unit in (SHARE, BOTH_WAYS)
    top = 1.0 if is_bounded else max(reach_of(panel.ends[0]) for panel in panels)
    is_signed = about.signed or any(np.nanmin(panel.ends[0]) < 0 for panel in panels)
    bar = {"tickformat": ".0%"} if about.is_share else {}
    n_columns = max(panel.rows[view.x].nunique() for panel in panels)
    same = {"showgrid": False, "zeroline": False, "tick0": 0}
    figure.update_xaxes(**same, dtick=-(-n_columns // 16))
    figure.update_yaxes(**same, dtick=-(-n_rows // 32), autorange="reversed")
    colours = colour_axis((-top if is_signed else 0.0, top), about.shown_unit, **bar)
    return figure.update_layout(coloraxis=colours, plot_bgcolor=BLANK, showlegend=False)


def _cells(view: View, panel: Panel) -> list[PlotlyTrace]:
    """Return the heat map of a panel, with dots on marked cells."""
    [by], [y], rows = view.by, panel.ys, panel.rows
    for name in (by, view.x):  # numbers are in order, and names as they come
        if not pd.api.types.is_numeric_dtype(rows[name]):
            names = [named(view.names, name, value) for value in rows[name]]
            rows = rows.assign(**{name: pd.Categorical(names, [*dict.fromkeys(names)])})
    numbers, *bounds = (
        rows.pivot(index=by, columns=view.x, values=name) for name in (y, *bound_columns(y))
    )
    where = "L%{y}H%{x}" if (by, view.x) == ("layer", "head") else "%{y}, %{x}"
    share = panel.about.is_share
    number = f"%{{z:{'.1%' if share else '.3g'}}} {panel.about.shown_unit}".strip()
    cells = {
        "type": "heatmap",
        "z": numbers.to_numpy(float),
        "customdata": np.stack([bound.to_numpy(float) for bound in bounds], -1),
        "coloraxis": "coloraxis",
        "hoverongaps": False,
        "hovertemplate": f"{where}<br>{number} {PERCENT if share else BOUNDS}<extra></extra>",
        "x": numbers.columns.tolist(),
        "y": numbers.index.tolist(),
    }
    if not view.marked:
        return [cells]
    marked = rows[rows[view.marked].astype(bool)]
    dots = {"x": marked[view.x].tolist(), "y": marked[by].tolist(), "hoverinfo": "skip"}
    marker = {"color": INK, "size": 5}
    return [cells, {"type": "scatter", "mode": "markers", **dots, "marker": marker}]


def _flat(y: Sequence[str | tuple[str, ...]]) -> Iterator[str]:
    for names in y:
        yield from (names,) if isinstance(names, str) else names
