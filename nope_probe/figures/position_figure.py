"""Who writes position and who reads it: an edge for each writer, maps of a reader's terms, clocks.

The circuit on top has a column for each layer: a box of its heads, which stands for what the layer
reads, its MLP below and RoPE above. Maps and clocks under it belong to one reader, which a switch
chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.components import INK
from nope_probe.figures.circuit_figure import MENU, Choice, add_switches
from nope_probe.figures.grid import axis, colour_limits, inside, keep, on, patch
from nope_probe.figures.intervals import (
    FLOOR,
    ValueAndBounds,
    interval_of,
    interval_text,
    percent,
    symmetric,
)
from nope_probe.figures.maps import MAX_POSITIONS
from nope_probe.figures.panels import heat_map
from nope_probe.figures.style import DIVERGING, SEQUENTIAL, TEMPLATE, ZERO, colour_bar
from nope_probe.maps.downsample import pool

TITLE = "Who writes position, and who reads it"
TERMS = {  # of a reader's pattern, in the order of their panels
    "all": "whole pattern",
    "rotation": "rotation",
    "alibi": "ALiBi",
    "written_key": "written into keys",
    "written_query": "into queries",
    "written_both": "into both",
    "covariance": "covariance",
}
ENCODINGS = {"rotation": "RoPE", "alibi": "ALiBi"}  # of the terms that no component writes
SIDES = {"key": "keys", "query": "queries"}
WITH, AGAINST = "rgba(217, 115, 13, 0.8)", "rgba(43, 123, 186, 0.8)"
ALL = "all"  # readers; or writers of a clock
MOST_EDGES = 12  # of a reader
MOST_READERS = 32  # of which the strongest are drawn
LEAST, LEAST_BESIDE = 0.01, 0.1  # shares that have an edge, alone and beside those of other readers
WIDEST = 14.0  # px of an edge that stands for the whole pattern
FEW = 8  # heads whose nodes have labels
CLOCKS = 4  # panels: all writers together, and the strongest
WIDE, PHONE = 1050, 310  # px of the plotting area
LARGEST, GAP, ROW_GAP = 230, 44, 74  # px: a panel's side, and what lies between panels
TOP, BOTTOM = 70 + MENU, 96  # px
LEFT = -0.16  # from the middle of a box to its left side, layers
Point = tuple[float, float]
Traces = list[tuple[go.Heatmap | go.Scatter, set[str]]]  # each with the choices that show it


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A way on which position comes to a reader.

    Attributes:
        reader: a layer or head.
        writer: a component, or a position encoding.
        into: `keys` or `queries`; `all paths` of a total effect; empty for an encoding.
        share: of the reader's pattern, with its bounds.
    """

    reader: str
    writer: str
    into: str
    share: ValueAndBounds

    @property
    def is_total(self) -> bool:
        """Whether it is an effect on all paths, not on the direct one."""
        return self.into == "all paths"


def position_circuit(
    terms: pd.DataFrame,
    writers: pd.DataFrame,
    effects: pd.DataFrame | None = None,
    *,
    maps: Mapping[str, Float[Any, "query_pos key_pos"]] | None = None,
    clocks: pd.DataFrame | None = None,
    reader: str | None = None,
    max_positions: int = MAX_POSITIONS,
) -> go.Figure:
    """Draw who writes the position that each layer or head reads.

    An edge is as wide as the writer's share of the reader's pattern: orange with the pattern, blue
    against it. A dashed edge is a total effect that differs from the direct share by more than both
    intervals say. A switch chooses a reader: its edges, the maps of its terms, and its keys' mean
    vectors along their two principal axes.

    Args:
        terms: `terms.csv`: layer, head where heads are traced, term, rms and share with bounds.
        writers: `writers.csv`: layer, head, side, writer, and share with its bounds.
        effects: `effects.csv`: layer, head, writer, direct and total with their bounds.
        maps: the terms' patterns by name, such as `L1/rotation`, nats.
        clocks: `clocks.csv`: layer, head, side, writer, position, axis_1, axis_2.
        reader: whose maps and clocks stand below the edges of all readers; by default the one with
            the strongest pattern.
        max_positions: larger maps are pooled to this many positions.

    Raises:
        ValueError: for a reader that the terms do not have.

    Example:
        >>> import pandas as pd
        >>> from nope_probe import figures
        >>> share = {"share": [1.0], "share_low": [0.9], "share_high": [1.1]}
        >>> terms = pd.DataFrame({"layer": [1], "term": ["written_key"], **share})
        >>> writers = pd.DataFrame({"layer": [1], "side": ["key"], "writer": ["MLP0"], **share})
        >>> list(figures.position_circuit(terms, writers).layout.meta["switches"]["Reader"])
        ['all', 'L1']
    """
    terms, writers = with_readers(terms), with_readers(writers)
    first = reader or strongest_reader(terms) or terms["reader"].iloc[-1]
    readers = shown_readers(terms, first)
    if first not in readers:
        raise ValueError(f"no reader {first!r}; there are {', '.join(readers)}")
    edges = {name: _edges_of(name, terms, writers, effects) for name in readers}
    places = _places([edge for own in edges.values() for edge in own], readers)
    names = _terms_in(maps or {}, readers)
    dials = {name: _dials_of(name, clocks) for name in readers}
    n_dials = max(map(len, dials.values()))
    traces: Traces = [(trace, {ALL, *readers}) for trace in (*_legend(edges), _nodes(places))]
    titles: dict[str, list[str]] = {}
    limits: dict[str, float] = {}
    for name in readers:
        chosen = {name, ALL} if name == first else {name}
        traces += _edge_traces(edges[name], places)
        found = {term: (maps or {}).get(f"{name}/{term}") for term in names}
        for panel, (term, values) in enumerate(found.items(), start=1):
            if values is not None:
                traces.append((_map(values, max_positions, panel, TERMS[term]), chosen))
                limits[name] = max(limits.get(name, FLOOR), symmetric(np.asarray(values), FLOOR))
        for panel, (writer, rows) in enumerate(dials[name].items(), start=1 + len(names)):
            traces.append((_dial(rows, panel, writer), chosen))
        heads = [TERMS[term] for term in names] + [_dial_title(name, each) for each in dials[name]]
        titles[name] = [f"<b>{name}</b>: {heads[0]}", *heads[1:]] if heads else []
        titles[name] += [""] * (len(names) + n_dials - len(heads))
    figure = go.Figure([trace for trace, _ in traces])
    _place(figure, places, len(names), n_dials)
    if all(edge.into for own in edges.values() for edge in own):
        figure.layout.yaxis.range = (-0.3, 1.05)  # nothing above the boxes
    choices: dict[str, Choice] = {}
    for choice in (ALL, *readers):
        below = first if choice == ALL else choice
        top = limits.get(below, FLOOR)
        keys: dict[str, Any] = colour_limits(np.array([-top, top]), "coloraxis.")
        keys |= {f"annotations[{i}].text": text for i, text in enumerate(titles[below])}
        keys |= {
            f"shapes[{i}].line.color": INK if _layer_of(box) == _layer_of(below) else ZERO
            for i, box in enumerate(_boxes(places))
        }
        visible = [choice in shown_in for _, shown_in in traces]
        choices[choice] = [{"visible": visible}, keys]
    for trace, (_, shown_in) in zip(figure.data, traces, strict=True):
        trace.visible = ALL in shown_in
    add_switches(figure, {"Reader": choices})
    above = {"x": 0.5, "y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    notes = [{"text": text, **inside(i + 1), **above} for i, text in enumerate(titles[first])]
    figure.layout.annotations = notes
    figure.layout.shapes[_layer_of(first)].line.color = INK
    top = limits.get(first, FLOOR)
    patch(figure, colour_limits(np.array([-top, top]), "coloraxis."))
    return figure


def reader_of(row: Mapping[Any, Any]) -> str:
    """Return the layer or head that a row is of.

    Example:
        >>> reader_of({"layer": 2}), reader_of({"layer": 2, "head": 1.0})
        ('L2', 'L2H1')
    """
    head = row.get("head", np.nan)
    return f"L{row['layer']:.0f}" + ("" if np.isnan(head) else f"H{head:.0f}")


def with_readers(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the name of each row's reader as a column."""
    return table.assign(reader=[reader_of(row) for row in table.to_dict("records")])


def strongest_reader(terms: pd.DataFrame) -> str | None:
    """Return the reader whose pattern is the strongest of those that exceed their noise."""
    if "rms" not in terms:
        return None
    above = with_readers(terms[(terms["term"] == "all") & (terms["rms_low"] > 0)])
    return None if above.empty else str(above.sort_values("rms").iloc[-1]["reader"])


def shown_readers(terms: pd.DataFrame, first: str | None = None) -> list[str]:
    """Return the readers that are shown: all, or of many the first and the strongest."""
    rows = with_readers(terms)
    readers = list(dict.fromkeys(rows["reader"]))
    if len(readers) <= MOST_READERS:
        return readers
    whole = rows[rows["term"] == "all"].sort_values("rms", ascending=False)
    kept = {first, *whole["reader"][: MOST_READERS - 1]}
    return [name for name in readers if name in kept]


def _edges_of(
    reader: str, terms: pd.DataFrame, writers: pd.DataFrame, effects: pd.DataFrame | None
) -> list[Edge]:
    """Return a reader's edges that are told from zero: encodings, its strongest writers, totals."""
    found = [
        Edge(reader=reader, writer=ENCODINGS[row["term"]], into="", share=interval_of(row, "share"))
        for row in terms[terms["reader"] == reader].to_dict("records")
        if row["term"] in ENCODINGS
    ]
    written = [
        Edge(
            reader=reader,
            writer=row["writer"],
            into=SIDES[row["side"]],
            share=interval_of(row, "share"),
        )
        for row in writers[writers["reader"] == reader].to_dict("records")
    ]
    if effects is not None and len(effects):
        of_reader = with_readers(effects)
        for row in of_reader[of_reader["reader"] == reader].to_dict("records"):
            (_, low, high), total = interval_of(row, "direct"), interval_of(row, "total")
            if total[1] > high or total[2] < low:
                written.append(
                    Edge(reader=reader, writer=row["writer"], into="all paths", share=total)
                )
    written.sort(key=lambda edge: -abs(edge.share[0]))
    found += written[:MOST_EDGES]
    return [
        edge
        for edge in found
        if abs(edge.share[0]) >= LEAST and (edge.share[1] > 0 or edge.share[2] < 0)
    ]


def _places(edges: Sequence[Edge], readers: Sequence[str]) -> dict[str, Point]:
    """Return where each node stands: a layer to the right, 0 to 1 upwards inside its box.

    A layer's own name is the left side of its box.
    """
    last = max(int(re.findall(r"\d+", name)[0]) for name in readers)
    names = {*readers, *(edge.writer for edge in edges if edge.into)}
    heads = [int(name.partition("H")[2]) for name in names if re.fullmatch(r"L\d+H\d+", name)]
    n_heads = 1 + max(heads, default=-1)
    found: dict[str, Point] = {}
    for layer in range(last + 1):
        found[f"L{layer}"] = layer + LEFT, 0.6
        for head in range(n_heads):
            found[f"L{layer}H{head}"] = float(layer), 0.92 - 0.64 * (head + 0.5) / n_heads
        for kind, (right, y) in {"ATTN": (0, 0.6), "BLOCK": (0, 0.6), "MLP": (0.32, 0.1)}.items():
            if f"{kind}{layer}" in names or (kind == "MLP" and layer < last):
                found[f"{kind}{layer}"] = float(layer + right), y
    sources = [name for name in ("pos_embed", "embed", "bias") if name in names]
    return found | {name: (-0.6, 0.7 - 0.3 * i) for i, name in enumerate(sources)}


def _legend(edges: Mapping[str, Sequence[Edge]]) -> Iterator[go.Scatter]:
    """Yield what the legend says of the colours and dashes that there are."""
    drawn = [edge for own in edges.values() for edge in own]
    kinds = {
        "with the pattern": (WITH, "solid", any(edge.share[0] > 0 for edge in drawn)),
        "against it": (AGAINST, "solid", any(edge.share[0] < 0 for edge in drawn)),
        "on all paths, where that differs": (ZERO, "dash", any(edge.is_total for edge in drawn)),
    }
    for label, (colour, dash, is_there) in kinds.items():
        if is_there:
            line = {"color": colour, "dash": dash, "width": 4}
            yield go.Scatter(x=[None], y=[None], mode="lines", line=line, name=label)


def _boxes(places: Mapping[str, Point]) -> list[str]:
    """Return the layers, each of which has a box."""
    return [name for name in places if re.fullmatch(r"L\d+", name)]


def _layer_of(name: str) -> int:
    return int(re.findall(r"\d+", name)[0])


def _nodes(places: Mapping[str, Point]) -> go.Scatter:
    """Return a node for each head, MLP and embedding; those of a small model have labels."""
    names = [name for name in places if name not in _boxes(places)]
    is_small = sum(name.startswith("L0H") for name in names) <= FEW and len(_boxes(places)) <= FEW
    return go.Scatter(
        x=[places[name][0] for name in names],
        y=[places[name][1] for name in names],
        mode="markers+text" if is_small else "markers",
        text=[re.sub(r"^L\d+|(?<=[A-Z]{2})\d+$", "", name) for name in names],
        textposition="bottom center",
        textfont={"size": 11},
        marker={"size": 9 if is_small else 5, "color": INK},
        hovertext=names,
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )


def _edge_traces(edges: Sequence[Edge], places: Mapping[str, Point]) -> Traces:
    """Return a reader's edges and their shares; weak edges are shown with their reader alone."""
    traces: Traces = []
    direct = {e.writer for e in edges if not e.is_total and abs(e.share[0]) >= LEAST_BESIDE}
    written = sorted((edge for edge in edges if edge.into), key=lambda edge: places[edge.writer][1])
    for edge in edges:
        x, y = places[edge.reader]
        is_main = abs(edge.share[0]) >= LEAST_BESIDE
        if edge.is_total and edge.writer in direct:
            is_main = False
        chosen = {edge.reader, ALL} if is_main else {edge.reader}
        if not edge.into:
            path = [(x - LEFT, 1.22), (x - LEFT, 0.97)]
        else:
            if edge.reader in _boxes(places):  # edges end side by side
                y = 0.3 + 0.6 * (written.index(edge) + 0.5) / len(written)
            path = _curve(places[edge.writer], (x, y), bend=-0.25 if edge.is_total else 0.0)
        colour = WITH if edge.share[0] > 0 else AGAINST
        about = f"{edge.writer} to {edge.reader}" + (f", {edge.into}" if edge.into else "")
        share = interval_text(percent(edge.share), "z.1f", "%")
        line = {"color": colour, "width": min(WIDEST, max(1.0, WIDEST * abs(edge.share[0])))}
        line["dash"] = "dash" if edge.is_total else "solid"
        text = [""] * len(path)
        text[len(path) // 2 if edge.into else 0] = (
            f"{'' if edge.into else f'{edge.writer} '}{100 * edge.share[0]:+.0f}%"
        )
        traces.append(
            (
                go.Scatter(
                    x=[point[0] for point in path],
                    y=[point[1] for point in path],
                    mode="lines+text",
                    line=line,
                    text=text,
                    textposition="top center",
                    textfont={"size": 11, "color": INK},
                    name=about,
                    hovertemplate=f"{about}<br>{share} of its pattern<extra></extra>",
                    showlegend=False,
                ),
                chosen,
            )
        )
    return traces


def _curve(start: Point, end: Point, bend: float) -> list[Point]:
    """Return a cubic curve that leaves and arrives level; one over several layers sags below."""
    (x0, y0), (x1, y1) = start, end
    sag = bend - 0.3 * max(0.0, x1 - x0 - 1)
    t = np.linspace(0, 1, 25)
    weights = np.stack([(1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3])
    reach = (x1 - x0) / 2
    corners = np.array([(x0, y0), (x0 + reach, y0 + sag), (x1 - reach, y1 + sag), (x1, y1)])
    return [(float(x), float(y)) for x, y in weights.T @ corners]


def _terms_in(
    maps: Mapping[str, Float[Any, "query_pos key_pos"]], readers: Sequence[str]
) -> list[str]:
    """Return the terms that are not nothing in the maps of all readers."""

    def size(name: str) -> float:
        return float(np.nanmax(np.abs(maps[name]), initial=0.0)) if name in maps else 0.0

    return [
        term
        for term in TERMS
        if any(size(f"{name}/{term}") > LEAST * size(f"{name}/{ALL}") for name in readers)
    ]


def _map(
    values: Float[Any, "query_pos key_pos"], max_positions: int, panel: int, name: str
) -> go.Heatmap:
    """Return the map of a term, pooled if it is large."""
    cells = pool(np.asarray(values, float)[None], max_positions)
    return heat_map(
        cells.values[0],
        float(cells.block),
        panel,
        name=name,
        coloraxis="coloraxis",
        value="%{z:.3g} nat",
    )


def _dials_of(reader: str, clocks: pd.DataFrame | None) -> dict[str, pd.DataFrame]:
    """Return the mean keys of a reader by writer: all writers together, then the strongest."""
    if clocks is None or clocks.empty:
        return {}
    rows = with_readers(clocks)
    rows = rows[(rows["reader"] == reader) & (rows["side"] == "key")].sort_values("position")
    by_writer = {str(writer): own for writer, own in rows.groupby("writer", sort=False)}
    return {name: by_writer[name] for name in list(by_writer)[:CLOCKS]}


def _dial(rows: pd.DataFrame, panel: int, writer: str) -> go.Scatter:
    """Return the line of mean keys from the first position to the last."""
    colours = {"color": rows["position"], "coloraxis": "coloraxis2", "size": 5}
    return go.Scatter(
        x=rows["axis_1"],
        y=rows["axis_2"],
        **on(panel),
        mode="lines+markers",
        line={"color": ZERO, "width": 1},
        marker=colours,
        customdata=rows["position"],
        hovertemplate=f"position %{{customdata}}<extra>{writer}</extra>",
        showlegend=False,
    )


def _dial_title(reader: str, writer: str) -> str:
    return f"<b>{reader}</b>: its mean keys" if writer == ALL else f"what {writer} adds"


def _place(figure: go.Figure, places: Mapping[str, Point], n_maps: int, n_dials: int) -> None:
    """Place the circuit over square maps and clocks, and keep the layout for a phone."""
    boxes = _boxes(places)
    bare = {"showgrid": False, "zeroline": False, "fixedrange": True}
    layers = {"tickvals": [_layer_of(box) for box in boxes], "ticktext": boxes}
    box = {"type": "rect", "y0": 0.22, "y1": 0.97, "line": {"width": 1.5, "color": ZERO}}
    half = {"len": 0.42, "lenmode": "fraction"}
    right = {"x": 1, "xanchor": "right"}
    maps, clocks = {**colour_bar("nats"), **half}, {**colour_bar("position"), **half, **right}
    figure.update_layout(
        template=TEMPLATE,
        title={"text": TITLE},
        legend={"y": 1, "yref": "paper", "yanchor": "bottom"},
        xaxis={**bare, **layers, "range": [-0.8 if "embed" in places else -0.3, len(boxes) - 0.7]},
        yaxis={**bare, "range": [-0.3, 1.35], "showticklabels": False},
        shapes=[{**box, "x0": places[name][0], "x1": places[name][0] - 2 * LEFT} for name in boxes],
        coloraxis={"colorscale": DIVERGING, "showscale": n_maps > 0, "colorbar": maps},
        coloraxis2={"colorscale": SEQUENTIAL, "showscale": n_dials > 0, "colorbar": clocks},
    )
    for panel in range(1, 1 + n_maps + n_dials):
        is_map, at = panel <= n_maps, axis(panel)
        first = axis(1 if is_map else 1 + n_maps)
        same = {"showgrid": False, "zeroline": not is_map, "nticks": 4, "constrain": "domain"}
        x, y = {**same, "anchor": f"y{at}"}, {**same, "anchor": f"x{at}"}
        if is_map:
            y |= {"autorange": "reversed", "constraintoward": "top"}
        if at == first:
            if is_map:  # all maps are square, since the first is
                y["scaleanchor"] = f"x{at}"
            x["title"] = {"text": "key position" if is_map else "first principal axis"}
            y["title"] = {"text": "query position" if is_map else "second"}
        else:
            x |= {"matches": f"x{first}"}
            y |= {"matches": f"y{first}", "showticklabels": False}
        figure.layout[f"xaxis{at}"], figure.layout[f"yaxis{at}"] = x, y
    patch(figure, _layout(WIDE, 340, (n_maps, n_maps), (n_dials, n_dials)))
    keep(figure, narrow=_layout(PHONE, 280, (n_maps, 2), (n_dials, 2)))


def _layout(width: int, circuit: int, *rows: tuple[int, int]) -> dict[str, Any]:
    """Return the layout keys that place the circuit, and rows of square panels below it.

    Args:
        width: of the plotting area, px.
        circuit: its height, px.
        rows: of the panels of one kind, how many there are and how many stand side by side.
    """
    boxes: list[tuple[float, float, float, float]] = [(0.0, 0.0, width, circuit)]  # px from the top
    bottom = float(circuit)
    for n_panels, columns in rows:
        side = min(LARGEST, (width - GAP * (columns - 1)) / max(1, columns))
        for panel in range(n_panels):
            row, column = divmod(panel, columns)
            top = bottom + row * (side + ROW_GAP) + ROW_GAP
            boxes.append((column * (side + GAP), top, side, side))
        bottom += -(-n_panels // max(1, columns)) * (side + ROW_GAP)
    keys: dict[str, Any] = {"height": bottom + TOP + BOTTOM}
    keys["margin"] = {"t": TOP, "b": BOTTOM, "l": 50, "r": 12}
    for panel, (left, top, across, down) in enumerate(boxes):
        keys[f"xaxis{axis(panel)}.domain"] = [left / width, min(1.0, (left + across) / width)]
        keys[f"yaxis{axis(panel)}.domain"] = [max(0.0, 1 - (top + down) / bottom), 1 - top / bottom]
    return keys
