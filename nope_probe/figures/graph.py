"""The graph of a look's steps back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.names import plain
from nope_probe.figures.style import GRID, ZERO, PlotlyTrace, draw_panels
from nope_probe.removal import INK, Writer

WITH, AGAINST = "rgba(217, 115, 13, 0.8)", "rgba(43, 123, 186, 0.8)"
WIDEST = 14.0  # px of the widest edge
BENDS = {"key": 0.0, "query": 0.5, "moved": -0.3}  # of edges between two nodes, rows
LEVEL = 60  # px between two rows of nodes
BELOW, BOW = 0.55, 0.03  # rows from a node to what stands under it; tokens, of an upward edge
NAME, NEXT = 46, 0.3  # px of a node with its name inside, and between nodes at one place, tokens
HALF = 12  # of the points of an edge
LEGEND = (
    ("raises the score", WITH, "solid"),
    ("lowers it", AGAINST, "solid"),
    ("moved from a token", ZERO, "dash"),
)
Point = tuple[float, float]
Node = tuple[str, int]  # a writer (or nothing: the token itself), and the token


class Edge(NamedTuple):
    """A term of a look, from what wrote its key or query; or what a head moved from a token."""

    start: Node
    end: Node
    kind: str
    nats: float


def steps_back(table: pd.DataFrame, pieces: Mapping[int, str], title: str) -> go.Figure:
    """Draw the steps back from a look: heads at the tokens of their queries, layers upwards.

    Edges are the terms of a head's score, in nats, from what wrote its key or its query, and what
    a head moved from a token (dashed). Readers are squares. Terms of position are under the head.

    Args:
        table: `why_steps.csv`.
        pieces: what to show of each token.
        title: the figure's title.
    """
    edges = _edges(table)
    looks = table.drop_duplicates(["layer", "head", "query"]).to_dict("records")
    looking: list[Node] = [(f"L{look['layer']}H{look['head']}", look["query"]) for look in looks]
    places = _places([*looking, *(node for term in edges for node in (term.end, term.start))])
    tokens = sorted({token for _, token in places})
    widest = max((abs(term.nats) for term in edges), default=1.0)
    curves = [_curve(term, places, widest) for term in edges]
    nowhere = {"type": "scatter", "x": [None], "y": [None], "mode": "lines"}
    legend = [
        {**nowhere, "name": name, "line": {"color": ink, "dash": dash, "width": 4}}
        for name, ink, dash in LEGEND
    ]
    top = max(y for _, y in places.values())
    labels = _labels(table, edges, curves, places)
    figure = draw_panels(
        title,
        {"": [*curves, *legend, _nodes(places, looking), labels]},
        panel=int(LEVEL * (top + 1.5)),
        bottom=110,
        x_title="token",
    )
    figure.update_xaxes(
        showgrid=False,
        zeroline=False,
        tickvals=[*range(len(tokens))],
        ticktext=[f"{plain(pieces[token])} {token}" for token in tokens],
        range=[-0.6, len(tokens) - 0.4],
    )
    return figure.update_yaxes(visible=False, range=[-0.3, top + 0.7])


def _curve(term: Edge, places: Mapping[Node, Point], widest: float) -> PlotlyTrace:
    """Return an edge; if it goes upwards, it passes left of the nodes between its ends."""
    (x0, y0), (x1, y1) = places[term.start], places[term.end]
    left = BOW * (1 + abs(y1 - y0)) if abs(x0 - x1) < NEXT else 0.0
    t = np.linspace(0, 1, 1 + 2 * HALF)
    bow = 4 * t * (1 - t)
    name = f"{term.start[0]} {term.kind} to {term.end[0]}".strip()
    return {
        "type": "scatter",
        "x": x0 + (x1 - x0) * t - left * bow,
        "y": y0 + (y1 - y0) * t + BENDS[term.kind] * bow,
        "mode": "lines",
        "line": {
            "color": WITH if term.nats > 0 else AGAINST,
            "width": max(1.0, WIDEST * abs(term.nats) / widest),
            "dash": "dash" if term.kind == "moved" else "solid",
        },
        "name": name,
        "hovertemplate": f"{name}<br>{term.nats:+.2f} nats<extra></extra>",
        "showlegend": False,
    }


def _nodes(places: Mapping[Node, Point], looking: Sequence[Node]) -> PlotlyTrace:
    """Return the writers as circles and the readers as squares, with their names inside."""
    drawn = {node: place for node, place in places.items() if node[0]}
    return {
        "type": "scatter",
        "x": [x for x, _ in drawn.values()],
        "y": [y for _, y in drawn.values()],
        "mode": "markers+text",
        "text": [name for name, _ in drawn],
        "textfont": {"size": 10, "color": INK},
        "marker": {
            "size": NAME,
            "symbol": ["square" if node in looking else "circle" for node in drawn],
            "color": GRID,
            "opacity": 1,
            "line": {"color": ZERO, "width": 1},
        },
        "hovertext": [f"{name}, token {token}" for name, token in drawn],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
    }


def _labels(
    table: pd.DataFrame,
    edges: Sequence[Edge],
    curves: Sequence[PlotlyTrace],
    places: Mapping[Node, Point],
) -> PlotlyTrace:
    """Return what is written at the middles of edges, and under heads their terms of position."""
    written = [
        ((curve["x"][HALF], curve["y"][HALF]), f"{term.kind} {term.nats:+.1f}")
        for term, curve in zip(edges, curves, strict=True)
    ]
    position = table[table["side"] == "position"]
    sums = position.groupby(["layer", "head", "query", "key"])["nats"].sum().reset_index()
    for look in sums.to_dict("records"):
        x, y = places[f"L{look['layer']}H{look['head']}", look["query"]]
        written.append(((x, y - BELOW), f"position {look['nats']:+.1f}"))
    return {
        "type": "scatter",
        "mode": "text",
        "x": [x for (x, _), _ in written],
        "y": [y for (_, y), _ in written],
        "text": [text for _, text in written],
        "textfont": {"size": 12, "color": INK},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _edges(table: pd.DataFrame) -> list[Edge]:
    """Return the edges, each once."""
    edges: dict[tuple[Node, Node, str], Edge] = {}
    for row in table[table["side"].isin(["key", "query"])].to_dict("records"):
        end = f"L{row['layer']}H{row['head']}", row["query"]
        start, kind = (row["writer"], row[row["side"]]), row["side"]
        if not pd.isna(row["moved_from"]):
            start, end, kind = ("", int(row["moved_from"])), start, "moved"
        edges.setdefault((start, end, kind), Edge(start, end, kind, row["nats"]))
    return [*edges.values()]


def _places(found: Iterable[Node]) -> dict[Node, Point]:
    """Return the places of nodes: their token among the shown tokens, and their row."""
    found = dict.fromkeys(found)
    tokens = sorted({token for _, token in found})
    rows = sorted({Writer(name).order[:2] for name, _ in found if name})
    places: dict[Node, Point] = {}
    taken = Counter[Point]()
    for name, token in found:
        y = 1.0 + rows.index(Writer(name).order[:2]) if name else 0.0
        x = float(tokens.index(token))
        places[name, token] = x + NEXT * taken[x, y], y
        taken[x, y] += 1
    return places
