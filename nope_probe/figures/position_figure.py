"""Writers and readers of position: an edge for each writer, maps of a reader's terms, clocks.

The circuit on top has a column for each layer: a box of its heads, which stands for the layer as a
reader, its MLP below and RoPE above. A switch chooses a reader's lead or pattern; maps and clocks
below the circuit belong to the reader.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.circuit_figure import MENU, Choice, add_switches
from nope_probe.figures.intervals import (
    FLOOR,
    excludes_zero,
    interval_of,
    interval_text,
    percent,
    symmetric,
)
from nope_probe.figures.maps import MAX_POSITIONS, lead_divisor
from nope_probe.figures.names import short
from nope_probe.figures.panels import Pooled, RowMaps, heat_map, lead_column, pool_with_leads
from nope_probe.figures.position_paths import (
    ALL_PATHS,
    BOX,
    CIRCUIT,
    HEIGHT,
    LABEL_FONT,
    LEFT,
    PHONE,
    Labels,
    Point,
    boxes_of,
    edge_paths,
    layer_of,
    x_range,
)
from nope_probe.figures.style import (
    DIVERGING,
    SEQUENTIAL,
    TEMPLATE,
    ZERO,
    Layout,
    Trace,
    axis,
    colour_bar,
    colour_limits,
    inside,
    on,
    patch,
)
from nope_probe.figures.words import shown_readers, strongest_reader, with_readers
from nope_probe.removal import INK, Writer

TITLE = "Who writes position, and who reads it"
ALL = "all"  # the whole pattern; readers; or writers of a clock
WRITTEN = ("written_key", "written_query", "written_both")
TERMS = (ALL, "rotation", "alibi", *WRITTEN, "covariance")  # in the order of their panels
ENCODINGS = {"rotation": "RoPE", "alibi": "ALiBi"}  # encodings of terms that no component writes
SIDES = {"key": "keys", "query": "queries"}
WITH, AGAINST = "rgba(217, 115, 13, 0.8)", "rgba(43, 123, 186, 0.8)"
MOST_EDGES = 12  # edges of a reader
MOST_TOGETHER = 24  # edges of all readers together
LEAST, LEAST_BESIDE = 0.01, 0.1  # smallest share with an edge, alone and beside other readers
MOSTLY = 0.5  # of a pattern: if more of it was written, patterns come first
WIDEST = 14.0  # px of an edge that stands for the whole pattern
MARGIN = 0.05  # below the lowest edge
FEW = 8  # up to this number of heads, nodes have labels
CLOCKS = 4  # panels: all writers together, and the strongest writers
WIDE = 1050  # px of the plotting area
LARGEST, GAP, ROW_GAP = 230, 44, 74  # px: a panel's side, and the gaps between panels
TOP, BOTTOM = 70 + MENU, 96  # px
LEGEND = 36  # px of two further rows of the legend, on a phone
Traces = list[tuple[Trace, set[str]]]  # traces with the choices that show them


def position_circuit(
    terms: pd.DataFrame,
    writers: pd.DataFrame,
    effects: pd.DataFrame | None = None,
    *,
    maps: Mapping[str, np.ndarray] | None = None,
    clocks: pd.DataFrame | None = None,
    reader: str | None = None,
    max_positions: int = MAX_POSITIONS,
    skip_keys: int = 1,
) -> go.Figure:
    """Draw the writers of the position that each layer or head reads.

    An edge is as wide as the writer's share of the reader's lead or pattern: orange with it, blue
    against it. A dashed edge is a total effect that differs from the direct share by more than both
    intervals allow; that of an attention is drawn by heads. A switch chooses a reader's lead or
    pattern: its edges, the maps of its terms, and its keys' mean vectors along their two principal
    axes. Leads come first where position that was written makes less than half of the pattern.

    Args:
        terms: `terms.csv`: layer, head where heads are traced, of, term, size and share with
            bounds.
        writers: `writers.csv`: layer, head, of, side, writer, and share with its bounds.
        effects: `effects.csv`: layer, head, of, writer, direct and total with their bounds.
        maps: the terms' patterns by name, such as `L1/rotation`, nats, with the lead in the columns
            of the first keys; and `query_positions`, the queries of their rows, if some queries
            have none.
        clocks: `clocks.csv`: layer, head, side, writer, position, axis_1, axis_2.
        reader: the reader whose maps and clocks are shown at first, below the edges of all readers;
            by default the reader with the strongest lead or pattern.
        max_positions: larger maps are pooled to this many positions.
        skip_keys: how many keys count as first, where the terms have a lead.

    Raises:
        ValueError: for a reader that the terms do not have.

    Example:
        >>> import pandas as pd
        >>> from nope_probe import figures
        >>> share = {"share": 1.0, "share_low": 0.9, "share_high": 1.1}
        >>> of = {"layer": [1, 1], "of": ["lead", "pattern"]}
        >>> size = {"size": [6.0, 1.0], "size_low": [5.0, 0.9], "size_high": [7.0, 1.1]}
        >>> terms = pd.DataFrame({**of, "term": "all", **size, **share})
        >>> writers = pd.DataFrame({**of, "side": "key", "writer": "MLP0", **share})
        >>> list(figures.position_circuit(terms, writers).layout.meta["switches"]["Reader"])
        ['all leads', 'L1 lead', 'all patterns', 'L1 pattern']
    """
    terms, writers, maps = with_readers(terms), with_readers(writers), maps or {}
    first = reader or strongest_reader(terms) or terms["reader"].iloc[-1]
    readers = shown_readers(terms, first)
    if first not in readers:
        raise ValueError(f"no reader {first!r}; there are {', '.join(readers)}")
    edges = _edges(terms, writers, effects)
    edges = edges[edges["reader"].isin(readers)].copy()
    places = _places(edges, readers)
    names, queries = _terms_in(maps, readers), maps.get("query_positions")
    dials = {name: _dials_of(name, clocks) for name in readers}
    n_dials = max(map(len, dials.values()))
    widest = WIDEST * min(1.0, 2 * FEW / len(boxes_of(places)))
    edges["width"] = (widest * edges["share"].abs()).clip(1.0, widest)
    questions, shown = _questions(terms, first), [ALL, *readers]
    view = partial(_view, several=len(questions) > 1)
    own_views = [view(*of) for of in zip(edges["reader"], edges["of"], strict=True)]
    edges["view"] = pd.Series(own_views, edges.index, dtype=str)
    views = _views(edges, {question: view(ALL, question) for question in questions})
    paths, nodes = edge_paths(edges, places, views), _nodes(places)
    everywhere = {view(name, question) for question in questions for name in shown}
    traces: Traces = [(trace, everywhere) for trace in (*_legend(edges), nodes)]
    limits, divisors = dict[str, float](), dict[str, float]()
    traces += _edge_traces(
        edges, paths, views, Labels(places, nodes, paths, edges["width"].to_dict(), views), first
    )
    for name in readers:
        chosen = {
            view(of, q) for of in ([name, ALL] if name == first else [name]) for q in questions
        }
        drawn = {
            panel: pool_with_leads(
                RowMaps(values=np.asarray(maps[f"{name}/{term}"], float)[None], queries=queries),
                max_positions,
                skip_keys if "lead" in questions else 0,
            )
            for panel, term in enumerate(names, start=1)
            if f"{name}/{term}" in maps
        }
        limits[name] = max(
            (symmetric(cells.values, FLOOR) for cells in drawn.values()), default=FLOOR
        )
        divisors[name] = lead_divisor([*drawn.values()], 0, limits[name])
        for panel, cells in drawn.items():
            term = short(names[panel - 1])
            traces += [(trace, chosen) for trace in _map(cells, panel, term, divisors[name])]
        for panel, rows in enumerate(dials[name].values(), start=1 + len(names)):
            traces.append((_dial(rows, panel), chosen))
    layout = _place(places, len(names), n_dials)
    lowest = min((y for path in paths.values() for _, y in path), default=0.0)
    highest = 1.05 if (edges["into"] != "").all() else HEIGHT[1]  # nothing above the boxes
    layout["yaxis"]["range"] = (min(0.0, lowest) - MARGIN, highest)
    above = {"x": 0.5, "y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    n_panels = len(names) + n_dials
    layout["annotations"] = [{**inside(1 + panel), **above} for panel in range(n_panels)]
    choices: dict[str, Choice] = {}
    for question, name in product(questions, shown):
        below, choice = first if name == ALL else name, view(name, question)
        top = limits[below]
        keys: dict[str, Any] = colour_limits((-top, top), "coloraxis.")
        if "lead" in questions:
            keys["coloraxis.colorbar.title.text"] = f"nats; first key ÷ {divisors[below]:.2g}"
        titles = [*map(short, names), *dials[below], *[""] * (n_dials - len(dials[below]))]
        keys |= {f"annotations[{i}].text": text for i, text in enumerate(titles)}
        if names:
            keys["annotations[0].text"] = f"<b>{below}</b>: {titles[0]}"
        keys |= {
            f"shapes[{layer}].line.color": INK if layer == layer_of(below) else ZERO
            for layer in range(len(boxes_of(places)))
        }
        choices[choice] = [{"visible": [choice in shown_in for _, shown_in in traces]}, keys]
    add_switches(layout, {"Reader": choices})
    layout["updatemenus"][0] |= {"x": 1, "xanchor": "right", "pad": {"b": LEGEND}}  # above it
    at_first = view(ALL, questions[0])
    patch(layout, choices[at_first][1])
    return go.Figure([{**trace, "visible": at_first in of} for trace, of in traces], layout)


def _questions(terms: pd.DataFrame, reader: str) -> list[str]:
    """Return the questions that terms answer; leads first if a pattern is mostly not written."""
    own = terms[(terms["reader"] == reader) & terms["term"].isin(WRITTEN)]
    written = own[own["of"] == "pattern"]["share"].sum()
    order = ("pattern", "lead") if written >= MOSTLY else ("lead", "pattern")
    return [question for question in order if question in {*terms["of"]}]


def _view(reader: str, question: str, *, several: bool) -> str:
    """Return the name of the choice of a reader, or of all readers, and a question."""
    if not several:
        return reader
    return f"{reader} {question}s" if reader == ALL else f"{reader} {question}"


def _edges(
    terms: pd.DataFrame, writers: pd.DataFrame, effects: pd.DataFrame | None
) -> pd.DataFrame:
    """Return the paths by which position reaches readers, if their shares differ from zero.

    Returns:
        reader, of (lead or pattern), writer (a component or a position encoding), share with its
        bounds, and into: `keys` or `queries`; `all paths` for a total effect; empty for an
        encoding.
    """
    encodings = terms[terms["term"].isin(ENCODINGS)]
    encodings = encodings.assign(writer=encodings["term"].map(ENCODINGS), into="")
    written = writers.assign(into=writers["side"].map(SIDES))
    if effects is not None and len(effects):
        of_effects = with_readers(effects)
        whole = {Writer(name).whole for name in writers["writer"] if Writer(name).head is not None}
        of_effects = of_effects[~of_effects["writer"].isin(whole)]
        differs = (of_effects["total_low"] > of_effects["direct_high"]) | (
            of_effects["total_high"] < of_effects["direct_low"]
        )
        totals = of_effects[differs].rename(columns=lambda name: name.replace("total", "share"))
        written = pd.concat([written, totals.assign(into=ALL_PATHS)])
    strongest = written.iloc[(-written["share"].abs()).argsort(kind="stable")]
    edges = pd.concat([encodings, strongest.groupby(["reader", "of"], sort=False).head(MOST_EDGES)])
    drawn = excludes_zero(edges, "share") & (edges["share"].abs() >= LEAST)
    return edges[drawn].reset_index(drop=True)


def _places(edges: pd.DataFrame, readers: Sequence[str]) -> dict[str, Point]:
    """Return the place of each node: its layer to the right, 0 to 1 upwards inside the box.

    A layer's own name is the left side of its box.
    """
    n_layers = 1 + max(map(layer_of, readers))
    names = {*readers, *edges["writer"][edges["into"] != ""]}
    heads = [writer.head for name in names if (writer := Writer.parse(name)) is not None]
    n_heads = 1 + max((head for head in heads if head is not None), default=-1)
    places: dict[str, Point] = {}
    for layer in range(n_layers):
        places[f"L{layer}"] = layer + LEFT, 0.6
        for head in range(n_heads):
            places[f"L{layer}H{head}"] = float(layer), 0.92 - 0.64 * (head + 0.5) / n_heads
        for kind, (right, y) in {"ATTN": (0, 0.6), "BLOCK": (0, 0.6), "MLP": (0.32, 0.1)}.items():
            if f"{kind}{layer}" in names or (kind == "MLP" and layer < n_layers - 1):
                places[f"{kind}{layer}"] = float(layer + right), y
    sources = [name for name in ("pos_embed", "embed", "bias") if name in names]
    return places | {name: (-0.6, 0.7 - 0.3 * i) for i, name in enumerate(sources)}


def _legend(edges: pd.DataFrame) -> Iterator[Trace]:
    """Yield the legend's entries for the colours and dashes in use."""
    kinds = {
        "with the lead or pattern": (WITH, "solid", edges["share"] > 0),
        "against it": (AGAINST, "solid", edges["share"] < 0),
        "on all paths, where that differs": (ZERO, "dash", edges["into"] == ALL_PATHS),
    }
    for label, (colour, dash, drawn) in kinds.items():
        if drawn.any():
            line = {"color": colour, "dash": dash, "width": 4}
            nowhere = {"type": "scatter", "x": [None], "y": [None]}
            yield {**nowhere, "mode": "lines", "line": line, "name": label}


def _nodes(places: Mapping[str, Point]) -> Trace:
    """Return a node for each head, MLP and embedding; a small model's nodes have labels."""
    boxes = boxes_of(places)
    names = [Writer(name) for name in places if name not in boxes]
    n_heads = sum(name.head is not None and name.block == 0 for name in names)
    is_small = n_heads <= FEW and len(boxes) <= FEW
    return {
        "type": "scatter",
        "x": [places[name][0] for name in names],
        "y": [places[name][1] for name in names],
        "mode": "markers+text" if is_small else "markers",
        "text": [name.short for name in names],
        "textposition": "bottom center",
        "textfont": {"size": 11},
        "marker": {"size": 9 if is_small else 5, "color": INK},
        "hovertext": names,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
    }


def _views(edges: pd.DataFrame, of_all: Mapping[str, str]) -> dict[Hashable, list[str]]:
    """Return the views that show each edge: its reader's, and the view of all readers.

    Among other readers, an edge shows only if it is strong, and one of the strongest.

    Args:
        edges: their views, of their readers.
        of_all: the view of all readers' leads, and of all patterns.
    """
    strong, total = edges["share"].abs() >= LEAST_BESIDE, edges["into"] == ALL_PATHS
    pairs = edges["writer"] + edges["view"]
    together = strong & ~(total & pairs.isin(pairs[strong & ~total]))
    sizes = edges["share"].abs().where(together)
    rank = sizes.groupby(edges["of"]).rank(method="first", ascending=False)
    together &= (rank <= MOST_TOGETHER) | (edges["into"] == "")
    both = zip(edges.index, edges["view"], edges["of"], together, strict=True)
    return {
        at: [view, of_all[question]] if is_together else [view]
        for at, view, question, is_together in both
    }


def _edge_traces(
    edges: pd.DataFrame,
    paths: Mapping[Hashable, Sequence[Point]],
    views: Mapping[Hashable, Sequence[str]],
    labels: Labels,
    first: str,
) -> Traces:
    """Return the edges of all readers, and above them the labels of each view.

    The edges of the reader that is shown at first get their labels first, then stronger edges.
    Without a free place, the share shows on hovering.
    """
    traces = Traces()
    ranked = edges["share"].abs() + edges["share"].abs().max() * (edges["reader"] == first)
    for at in ranked.sort_values(ascending=False, kind="stable").index:
        edge = edges.loc[at]
        text = f"{100 * edge['share']:+.0f}%"
        text = text if edge["into"] else f"{edge['writer']}<br>{text}"
        placed = [view for view in views[at] if labels.place(view, at, text)]
        is_above = edge["into"] == "" and placed == views[at]
        labels.write([] if is_above else placed, text)
        traces.append((_edge_trace(edge, paths[at], text if is_above else ""), {*views[at]}))
    return [*traces, *labels.traces()]


def _edge_trace(edge: pd.Series, path: Sequence[Point], text: str) -> Trace:
    """Return an edge; that of an encoding has its label at its upper end."""
    about = f"{edge['writer']} to {edge['reader']}" + (edge["into"] and f", {edge['into']}")
    share = interval_text(percent(interval_of(edge, "share")), "z.1f", "%")
    line = {
        "color": WITH if edge["share"] > 0 else AGAINST,
        "width": edge["width"],
        "dash": "dash" if edge["into"] == ALL_PATHS else "solid",
    }
    return {
        "type": "scatter",
        "x": [point[0] for point in path],
        "y": [point[1] for point in path],
        "mode": "lines" if edge["into"] else "lines+text",
        "line": line,
        "text": ["" if edge["into"] else text, *[""] * (len(path) - 1)],
        "textposition": "top center",
        "textfont": LABEL_FONT,
        "cliponaxis": not text,
        "name": about,
        "hovertemplate": f"{about}<br>{share} of its {edge['of']}<extra></extra>",
        "showlegend": False,
    }


def _terms_in(maps: Mapping[str, np.ndarray], readers: Sequence[str]) -> list[str]:
    """Return the terms that are not 0 in the maps of all readers."""

    def size(name: str) -> float:
        return float(np.nanmax(np.abs(maps[name]), initial=0.0)) if name in maps else 0.0

    return [
        term
        for term in TERMS
        if any(size(f"{name}/{term}") > LEAST * size(f"{name}/{ALL}") for name in readers)
    ]


def _map(cells: Pooled, panel: int, name: str, divisor: float) -> list[Trace]:
    """Return the map of a term, and its lead, divided to have the colours of the map."""
    span, value = float(cells.block), "%{z:.3g} nat"
    of_map = heat_map(cells.values[0], span, panel, name=name, coloraxis="coloraxis", value=value)
    if cells.leads is None:
        return [of_map]
    return [of_map, lead_column(cells.leads[0], of_map, divisor)]


def _dials_of(reader: str, clocks: pd.DataFrame | None) -> dict[str, pd.DataFrame]:
    """Return a reader's mean keys by panel title: of all writers, then of the strongest writers."""
    if clocks is None or clocks.empty:
        return {}
    rows = with_readers(clocks)
    rows = rows[(rows["reader"] == reader) & (rows["side"] == "key")].sort_values("position")
    return {
        f"<b>{reader}</b>: its mean keys" if writer == ALL else f"what {writer} adds": own
        for writer, own in list(rows.groupby("writer", sort=False))[:CLOCKS]
    }


def _dial(rows: pd.DataFrame, panel: int) -> Trace:
    """Return the line of mean keys from the first position to the last."""
    return {
        "type": "scatter",
        "x": rows["axis_1"],
        "y": rows["axis_2"],
        **on(panel),
        "mode": "lines+markers",
        "line": {"color": ZERO, "width": 1},
        "marker": {"color": rows["position"], "coloraxis": "coloraxis2", "size": 5},
        "customdata": rows["position"],
        "hovertemplate": f"position %{{customdata}}<extra>{rows['writer'].iloc[0]}</extra>",
        "showlegend": False,
    }


def _place(places: Mapping[str, Point], n_maps: int, n_dials: int) -> Layout:
    """Return the layout of the circuit over square maps and clocks, also for a phone."""
    boxes = boxes_of(places)
    bare = {"showgrid": False, "zeroline": False, "fixedrange": True}
    layers = {"tickvals": [*range(len(boxes))], "ticktext": boxes}
    half = {"len": 0.42, "lenmode": "fraction"}
    right = {"x": 1, "xanchor": "right"}
    maps, clocks = {**colour_bar("nats"), **half}, {**colour_bar("position"), **half, **right}
    every = -(-len(boxes) // FEW)
    narrow = _layout(PHONE, CIRCUIT[1], (n_maps, 2), (n_dials, 2))
    narrow["height"] += LEGEND
    narrow["margin"]["t"] += LEGEND
    narrow |= {"xaxis.tickvals": layers["tickvals"][::every], "xaxis.ticktext": boxes[::every]}
    layout: Layout = {
        "template": TEMPLATE,
        "title": {"text": TITLE},
        "legend": {"y": 1, "yref": "paper", "yanchor": "bottom"},
        "xaxis": {
            **bare,
            **layers,
            "range": x_range(places),
        },
        "yaxis": {**bare, "range": HEIGHT, "showticklabels": False},
        "shapes": [
            {
                "type": "rect",
                "x0": places[name][0],
                "x1": places[name][0] - 2 * LEFT,
                "y0": BOX[0],
                "y1": BOX[1],
                "line": {"width": 1.5, "color": ZERO},
            }
            for name in boxes
        ],
        "coloraxis": {"colorscale": DIVERGING, "showscale": n_maps > 0, "colorbar": maps},
        "coloraxis2": {"colorscale": SEQUENTIAL, "showscale": n_dials > 0, "colorbar": clocks},
        "meta": {"narrow": narrow},
    }
    for panel in range(1, 1 + n_maps + n_dials):
        is_map, at = panel <= n_maps, axis(panel)
        first = axis(1 if is_map else 1 + n_maps)
        same = {"showgrid": False, "zeroline": not is_map, "nticks": 4, "constrain": "domain"}
        x, y = {**same, "anchor": f"y{at}"}, {**same, "anchor": f"x{at}"}
        if is_map:
            y |= {"autorange": "reversed", "constraintoward": "top"}
        if at == first:
            if is_map:  # all maps are square, because the first is
                y["scaleanchor"] = f"x{at}"
            x["title"] = {"text": "key position" if is_map else "first principal axis"}
            y["title"] = {"text": "query position" if is_map else "second"}
        else:
            x |= {"matches": f"x{first}"}
            y |= {"matches": f"y{first}", "showticklabels": False}
        layout |= {f"xaxis{at}": x, f"yaxis{at}": y}
    patch(layout, _layout(WIDE, CIRCUIT[0], (n_maps, n_maps), (n_dials, n_dials)))
    return layout


def _layout(width: int, circuit: int, *rows: tuple[int, int]) -> dict[str, Any]:
    """Return the layout keys that place the circuit, and rows of square panels below it.

    Args:
        width: the plotting area's width, px.
        circuit: the circuit's height, px.
        rows: for each kind of panels, their number, and how many stand side by side.
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
    keys["margin"] = {"t": TOP, "b": BOTTOM, "l": 50, "r": 24}
    for panel, (left, top, across, down) in enumerate(boxes):
        keys[f"xaxis{axis(panel)}.domain"] = [left / width, min(1.0, (left + across) / width)]
        keys[f"yaxis{axis(panel)}.domain"] = [max(0.0, 1 - (top + down) / bottom), 1 - top / bottom]
    return keys
