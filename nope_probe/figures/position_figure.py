"""Writers and readers of position: a graph, its edges in a table, and what is below them.

In the graph, a layer as a reader is on top, with RoPE above it; its heads and its MLP, which write
for later layers, are right of it. A switch chooses a reader's lead or pattern; the maps and clocks
below the graph belong to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nope_probe.figures import graph
from nope_probe.figures.circuit_figure import MENU, Choice, add_switches
from nope_probe.figures.graph import AGAINST, WIDEST, WITH
from nope_probe.figures.intervals import estimate_text, excludes_zero
from nope_probe.figures.maps import MAX_POSITIONS
from nope_probe.figures.position_terms import ALL, LEAST, WRITTEN, below_graph, terms_in
from nope_probe.figures.style import (
    DIVERGING,
    SEQUENTIAL,
    TEMPLATE,
    ZERO,
    PlotlyTrace,
    axis,
    colour_bar,
    patch,
    places,
)
from nope_probe.figures.words import shown_readers, strongest_reader, with_readers
from nope_probe.removal import Writer

TITLE = "Who writes position, and who reads it"
ALL_PATHS = "all paths"  # the edge of a total effect
ENCODINGS = {"rotation": "RoPE", "alibi": "ALiBi"}  # encodings of terms that no component writes
SIDES = {"key": "keys", "query": "queries"}
BENDS = {"keys": 0.0, "queries": 0.5, ALL_PATHS: -0.5, "": 0.0}  # of edges between two nodes, rows
MOST_EDGES = 12  # edges of a reader
MOST_TOGETHER = 24  # edges of all readers together, besides the encodings'
LEAST_TOGETHER = 0.1  # smallest share with an edge among all readers
MOSTLY = 0.5  # of a pattern: if more of it was written, patterns come first
FEW = 5  # with up to so many layers, nodes have their names inside
GRAPH, TABLE, LARGEST, ROW_GAP = 430, 300, 210, 70  # px: heights of rows, and between rows
WIDE, PHONE = 1020, 310  # px across of the plotting area
ROWS = 18  # of the table
AS_TEXT = {"xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 12}}
TOP, BOTTOM = 70 + MENU, 96  # px
LEGEND = 36  # px of two further rows of the legend, on a phone


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
    """Draw the writers of the position that each layer or head reads, and a table of their shares.

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
    first: str = reader or strongest_reader(terms) or terms["reader"].iloc[-1]
    readers = shown_readers(terms, first)
    if first not in readers:
        raise ValueError(f"no reader {first!r}; there are {', '.join(readers)}")
    edges = _edges(terms, writers, effects).loc[lambda rows: rows["reader"].isin(readers)]
    questions, names = _questions(terms, first), terms_in(maps, readers)
    views = {
        f"{name} {of}{'s' * (name == ALL)}" if len(questions) > 1 else name: (name, of)
        for of, name in product(questions, [ALL, *readers])
    }
    shown = {view: _shown(edges, *of, first) for view, of in views.items()}
    nodes = _places(edges, [*readers, *edges["writer"][edges["into"] != ""]])
    traces, n_first = _graph(edges, nodes, shown), skip_keys if "lead" in questions else 0
    below = {
        name: below_graph(name, names, maps, clocks, max_positions, n_first) for name in readers
    }
    shows = {view: first if name == ALL else name for view, (name, _) in views.items()}
    for name, part in below.items():
        showing = {view for view, of in shows.items() if of == name}
        traces += [(trace, showing) for trace in part.traces]
    n_panels = max(len(part.titles) for part in below.values())
    choices: dict[str, Choice] = {}
    for view, name in shows.items():
        blank = [" "] * (n_panels - len(below[name].titles))
        texts = [*below[name].titles, *blank, *_table(shown[view])]
        written = {f"annotations[{i}].text": text for i, text in enumerate(texts)}
        visible = {"visible": [view in showing for _, showing in traces]}
        choices[view] = [visible, below[name].colours | written]
    layout = _place(nodes, len(names), n_panels - len(names)).to_dict()["layout"]
    add_switches(layout, {"Reader": choices})
    layout["updatemenus"][0] |= {"x": 1, "xanchor": "right", "pad": {"b": 36}}  # above the legend
    patch(layout, choices[at_first := next(iter(views))][1])
    return go.Figure([{**trace, "visible": at_first in of} for trace, of in traces], layout)


def _questions(terms: pd.DataFrame, reader: str) -> list[str]:
    """Return the questions that terms answer; leads first if a pattern is mostly not written."""
    written = terms[(terms["reader"] == reader) & terms["term"].isin(WRITTEN)]
    of_pattern = written[written["of"] == "pattern"]["share"].sum()
    order = ("pattern", "lead") if of_pattern >= MOSTLY else ("lead", "pattern")
    return [question for question in order if question in {*terms["of"]}]


def _edges(
    terms: pd.DataFrame, writers: pd.DataFrame, effects: pd.DataFrame | None
) -> pd.DataFrame:
    """Return the paths by which position reaches readers, if their shares differ from zero.

    Returns:
        reader, of (lead or pattern), writer (a component or a position encoding), share with its
        bounds; into: `keys` or `queries`; `all paths` for a total effect; empty for an encoding;
        and start, the name of the node of the writer or encoding.
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
    layers = edges["layer"].astype(str)
    edges["start"] = edges["writer"].where(edges["into"] != "", edges["writer"] + ", L" + layers)
    return edges[drawn].reset_index(drop=True)


def _shown(edges: pd.DataFrame, reader: str, question: str, first: str) -> pd.DataFrame:
    """Return the edges of a view, the strongest first; among all readers, strong edges alone.

    Among all readers, a total effect shows only where the direct edge does not, and the edges of
    the reader whose maps are shown come first.
    """
    edges = edges[edges["of"] == question]
    if reader != ALL:
        edges = edges[edges["reader"] == reader]
    sizes = edges["share"].abs().sort_values(ascending=False, kind="stable")
    edges = edges.loc[sizes.index]
    if reader == ALL:
        edges = edges[edges["share"].abs() >= LEAST_TOGETHER]
        ends, total = edges["writer"] + " " + edges["reader"], edges["into"] == ALL_PATHS
        edges = edges[~(total & ends.isin(ends[~total]))]
        edges = edges.drop(edges.index[edges["into"] != ""][MOST_TOGETHER:])
    return edges.sort_values("reader", key=lambda name: name != first, kind="stable")


def _places(edges: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return the nodes by name: x (layers to the right), y (a row for each kind), and their text.

    Layers as readers are in the upper row, with encodings above and to the left of them.

    Args:
        edges: with the `start` of encodings.
        names: readers, and writers with edges.
    """
    nodes = pd.DataFrame(index=pd.Index(dict.fromkeys(names)))
    nodes["kind"] = [writer.short if (writer := Writer.parse(name)) else "" for name in nodes.index]
    rows = sorted({*nodes["kind"]}, key=lambda kind: (kind != "", kind[:1] != "H", len(kind), kind))
    layers = nodes.index.str.extract(r"(\d+)", expand=False).astype(float).fillna(-1)
    nodes["x"] = layers + np.where(nodes["kind"] == "", 0, 0.5)
    nodes["y"] = [-rows.index(kind) for kind in nodes["kind"]]
    nodes["text"] = nodes["kind"].where(nodes["kind"] != "", nodes.index)
    encodings = edges[edges["into"] == ""].drop_duplicates("start").set_index("start")
    above = pd.DataFrame({"x": encodings["layer"] - 0.3, "y": 1, "text": encodings["writer"]})
    return pd.concat([nodes, above])


def _edge(edge: pd.Series, nodes: pd.DataFrame) -> PlotlyTrace:
    """Return a curve from a writer or an encoding to a reader."""
    widest = WIDEST * min(1.0, 2 * FEW / max(1.0, nodes["x"].max()))
    start, end = (
        tuple(nodes.loc[edge[at], ["x", "y"]].to_numpy(float)) for at in ("start", "reader")
    )
    return graph.edge(
        start,
        end,
        edge["share"],
        float(np.clip(widest * abs(edge["share"]), 1, widest)),
        (0.0, BENDS[edge["into"]]),
        "dash" if edge["into"] == ALL_PATHS else "solid",
        f"{_named(edge)}<br>{estimate_text(edge, 'share')} of its {edge['of']}",
    )


def _graph(
    edges: pd.DataFrame, nodes: pd.DataFrame, shown: Mapping[str, pd.DataFrame]
) -> list[tuple[PlotlyTrace, set[str]]]:
    """Return edges, the legend and nodes, each with the views that show it.

    Readers are squares; the nodes of a few layers have their names inside. The legend has the
    colours and dashes in use.
    """
    traces = [
        (_edge(edge, nodes), {view for view, rows in shown.items() if index in rows.index})
        for index, edge in edges.iterrows()
    ]
    kinds: list[tuple[str, str, graph.Dash, pd.Series]] = [
        ("with the lead or pattern", WITH, "solid", edges["share"] > 0),
        ("against it", AGAINST, "solid", edges["share"] < 0),
        ("on all paths, where that differs", ZERO, "dash", edges["into"] == ALL_PATHS),
    ]
    of_nodes = graph.nodes(
        nodes["x"].to_numpy(float),
        nodes["y"].to_numpy(float),
        [*nodes.index],
        nodes["text"].tolist() if nodes["x"].max() < FEW else None,
        (nodes["kind"] == "").to_numpy(),
    )
    entries = graph.legend(
        (label, colour, dash) for label, colour, dash, drawn in kinds if drawn.any()
    )
    return traces + [(trace, {*shown}) for trace in (*entries, of_nodes)]


def _named(edge: Mapping[Any, Any] | pd.Series, to: str = "to") -> str:
    """Return the ends of an edge, and into what of its reader it leads."""
    return f"{edge['writer']} {to} {edge['reader']}" + (edge["into"] and f", {edge['into']}")


def _table(edges: pd.DataFrame) -> tuple[str, str]:
    """Return the strongest edges of a view, and their shares with intervals, as lines."""
    rows = edges.iloc[:ROWS].to_dict("records")
    names = [_named(row, "→") for row in rows]
    shares = [estimate_text(row, "share") for row in rows]
    more = [f"and {len(edges) - ROWS} more"] if len(edges) > ROWS else []
    return "<br>".join(["<b>edge</b>", *names, *more]), "<br>".join(["<b>share</b>", *shares])


def _place(nodes: pd.DataFrame, n_maps: int, n_dials: int) -> go.Figure:
    """Return the graph next to its table, over square maps and clocks, without traces."""
    columns = max(3, n_maps, n_dials)
    wide = _arrange(n_maps, n_dials, columns, round(0.6 * columns), WIDE)
    narrow = _arrange(n_maps, n_dials, 2, 2, PHONE)
    narrow.layout.margin.t += LEGEND
    narrow.layout.height += LEGEND
    x, y = nodes["x"], nodes["y"]
    bare = {"showgrid": False, "zeroline": False, "fixedrange": True}
    ends = {"range": [x.min() - 0.3, x.max() + 0.3], "dtick": -(-int(x.max() + 1) // FEW)}
    half, right = {"len": 0.42, "lenmode": "fraction"}, {"x": 1, "xanchor": "right"}
    bars = {**colour_bar("nats"), **half}, {**colour_bar("position"), **half, **right}
    wide.update_layout(
        title_text=TITLE,
        legend={"y": 1, "yref": "paper", "yanchor": "bottom"},
        xaxis={**bare, **ends, "tickprefix": "L", "tick0": 0},
        yaxis={**bare, "range": [y.min() - 0.7, y.max() + 0.7], "showticklabels": False},
        coloraxis={"colorscale": DIVERGING, "showscale": n_maps > 0, "colorbar": bars[0]},
        coloraxis2={"colorscale": SEQUENTIAL, "showscale": n_dials > 0, "colorbar": bars[1]},
    )
    return wide.update_layout(meta={"narrow": places(narrow)})


def _span(columns: int, **kind: str) -> list[dict[str, str | int] | None]:
    return [{"colspan": columns, **kind}, *[None] * (columns - 1)]


def _arrange(n_maps: int, n_dials: int, columns: int, left: int, width: int) -> go.Figure:
    """Return the panels on one kind of screen.

    Args:
        n_maps: how many maps are below graph and table.
        n_dials: how many clocks are below the maps.
        columns: panels in a row.
        left: the columns of the graph; the table has the others, or is below.
        width: of the plotting area, px.
    """
    table = _span(columns - left or columns, type="table")
    top = [(GRAPH, [*_span(left), *table])]
    if left == columns:
        top = [(GRAPH, _span(left)), (TABLE, table)]
    counts = [min(columns, n - at) for n in (n_maps, n_dials) for at in range(0, n, columns)]
    side = min(LARGEST, width / columns)
    heights = [*(height for height, _ in top), *[side] * len(counts)]
    specs = [*(cells for _, cells in top), *([*[{}] * n, *[None] * (columns - n)] for n in counts)]
    inner = sum(heights) + ROW_GAP * (len(heights) - 1)
    figure = make_subplots(
        len(specs),
        columns,
        specs=specs,
        row_heights=heights,
        horizontal_spacing=0.04,
        vertical_spacing=ROW_GAP / inner,
        subplot_titles=["", "", *[" "] * (n_maps + n_dials)],
    ).update_annotations(font_size=12)
    place = figure.get_subplot(len(top), 1 + left % columns)
    for x, end in zip(place.x, ("left", "right"), strict=True):
        figure.add_annotation(x=x, y=place.y[1], xanchor=end, align=end, yanchor="top", **AS_TEXT)
    for panel in range(1, 1 + n_maps + n_dials):
        is_map, first = panel <= n_maps, 1 if panel <= n_maps else 1 + n_maps
        x, y = (figure.layout[f"{along}axis{axis(panel)}"] for along in "xy")
        same = {"showgrid": False, "zeroline": not is_map, "nticks": 4, "constrain": "domain"}
        x.update(same, matches=None if panel == first else f"x{axis(first)}")
        y.update(same, matches=None if panel == first else f"y{axis(first)}")
        y.showticklabels = panel == first
        if is_map:
            y.update(autorange="reversed", constraintoward="top")
    if n_maps:  # all maps are square, because the first is
        figure.layout.yaxis2.update(scaleanchor="x2", title_text="query position")
        figure.layout.xaxis2.title.text = "key position"
    if n_dials:
        figure.layout[f"xaxis{axis(1 + n_maps)}"].title.text = "first principal axis"
        figure.layout[f"yaxis{axis(1 + n_maps)}"].title.text = "second"
    return figure.update_layout(
        template=TEMPLATE,
        height=inner + TOP + BOTTOM,
        margin={"t": TOP, "b": BOTTOM, "l": 24, "r": 24},
    )
