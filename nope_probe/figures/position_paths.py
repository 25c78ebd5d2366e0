"""The circuit of `trace`: the places of layers and writers, and the paths of edges and labels.

An edge from one layer to the next is a curve through the gap between their boxes. An edge that
passes over layers runs in a lane below all layers. Two edges of one view never share a lane.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from nope_probe.figures.style import Trace
from nope_probe.removal import INK, Writer

ALL_PATHS = "all paths"  # the edge of a total effect
PHONE = 310  # px of the plotting area on a phone
CIRCUIT = 450, 380  # px of the circuit's height, on a wide screen and on a PHONE
HEIGHT = -1.05, 1.35  # the farthest ends of the circuit's vertical axis
BOX = 0.22, 0.97  # the lower and upper side of a layer's box
LEFT = -0.16  # from the middle of a box to its left side, layers
LANES = 0.1, 0.85  # from 0 down to the lanes, and the depth of all lanes at most
LABELLED = 0.1  # smallest share whose lane has room for its label
NARROW = 4  # px between lanes without labels
LEAVE, RISE = 0.3, 0.36  # layers: from a head to where its edge descends, and a rise's width
LETTER = 9, 13  # px of a letter of a label in a printed column, across and down
NEAR = 4  # px from a steep edge to the label beside it
LABEL_FONT = {"size": 11, "color": INK}
PIXEL = (HEIGHT[1] - HEIGHT[0]) / CIRCUIT[1]  # of the vertical axis, on a PHONE
STEPS = 25  # points of a curve
Point = tuple[float, float]
Box = tuple[float, float, float, float]
Views = Mapping[Hashable, Collection[str]]  # the views that show each edge


def layer_of(name: str) -> int:
    """Return the number of the layer in a name such as `L3H1`."""
    return int(re.findall(r"\d+", name)[0])


def boxes_of(places: Mapping[str, Point]) -> list[str]:
    """Return the layers; every layer has a box."""
    return [name for name in places if Writer.parse(name) is None]


def x_range(places: Mapping[str, Point]) -> tuple[float, float]:
    """Return the ends of the circuit's horizontal axis, in layers."""
    return -0.8 if "embed" in places else -0.3, len(boxes_of(places)) - 0.7


def edge_paths(
    edges: pd.DataFrame, places: Mapping[str, Point], views: Views
) -> dict[Hashable, list[Point]]:
    """Return the points of each edge; a reader's edges into its box end side by side.

    Args:
        edges: reader, view, writer, share, width in px, and into, which is empty for an encoding.
        places: the place of each node, and of each layer's left side.
        views: the views that show each edge.
    """
    written = edges[edges["into"] != ""]
    starts = {at: places[writer] for at, writer in written["writer"].items()}
    layers = {at: layer_of(reader) for at, reader in written["reader"].items()}
    spans = {
        at: (x, float(layers[at])) for at, (x, _) in starts.items() if _layer_after(x) < layers[at]
    }
    lanes = _lanes(spans, edges, views)
    heights = pd.Series({at: lanes.get(at, start[1]) for at, start in starts.items()}, dtype=float)
    of_reader = heights.groupby(written["view"])
    rank = of_reader.rank(method="first")
    share = ((rank - 0.5) / of_reader.transform("size")).to_dict()  # of the box's height
    paths = dict[Hashable, list[Point]]()
    for at, edge in edges.iterrows():
        x, y = places[edge["reader"]]
        if not edge["into"]:
            paths[at] = [(x - LEFT, 1.18), (x - LEFT, BOX[1])]
            continue
        if "H" not in edge["reader"]:
            y = BOX[0] + 0.08 + 0.6 * share[at]
        if at in lanes:
            paths[at] = _by_lane(starts[at], (x, y), lanes[at])
        else:
            bend = -0.25 if edge["into"] == ALL_PATHS else 0.0
            paths[at] = _curve(starts[at], (x, y), bend)
    return paths


def _layer_after(x: float) -> int:
    """Return the first layer whose box lies to the right of a place."""
    return int(np.ceil(x - LEFT + 1e-9))


def _lanes(
    spans: Mapping[Hashable, tuple[float, float]], edges: pd.DataFrame, views: Views
) -> dict[Hashable, float]:
    """Return the height of each edge's lane, short edges above long edges.

    Args:
        spans: the ends of each edge in its lane, layers.
        edges: share, and width in px.
        views: the views that show each edge.
    """
    lanes: list[list[Hashable]] = []
    for at in sorted(spans, key=lambda at: spans[at][1] - spans[at][0]):
        free = (
            lane
            for lane in lanes
            if not any(
                spans[at][0] < spans[other][1]
                and spans[other][0] < spans[at][1]
                and {*views[at]} & {*views[other]}
                for other in lane
            )
        )
        lane = next(free, [])
        if not lane:
            lanes.append(lane)
        lane.append(at)
    halves = [float(np.max(edges.loc[lane, "width"].to_numpy(float))) / 2 for lane in lanes]
    gaps = [
        LETTER[1] if (edges.loc[lane, "share"].abs() >= LABELLED).any() else NARROW
        for lane in lanes
    ]
    above = [0.0, *halves]
    steps = [PIXEL * (above[i] + gaps[i] + half) for i, half in enumerate(halves)]
    depths = LANES[0] + np.cumsum(steps) * min(1.0, LANES[1] / max(sum(steps), PIXEL))
    return {at: -float(y) for y, lane in zip(depths, lanes, strict=True) for at in lane}


def _by_lane(start: Point, end: Point, lane: float) -> list[Point]:
    """Return a path that descends in the gap after its start, and rises in the gap before its end.

    It leaves a head level, so that it passes over the MLP in the gap.
    """
    (x0, y0), (x1, y1) = start, end
    down = _layer_after(x0) + LEFT - 0.04
    leave = x0 + LEAVE if down - x0 > 2 * LEAVE else x0
    side = round(x1) + LEFT if x1 > round(x1) + LEFT else x1
    rise = side - RISE
    n_level = int(np.clip((rise - down) / 0.1, 2, 4 * STEPS))
    level = [(float(x), lane) for x in np.linspace(down, rise, n_level)[1:-1]]
    falling, rising = _curve((leave, y0), (down, lane)), _curve((rise, lane), (side, y1))
    return [*_apart(start, (leave, y0)), *falling, *level, *rising, *_apart(end, (side, y1))]


def _apart(point: Point, from_point: Point) -> list[Point]:
    return [point] if point != from_point else []


def _curve(start: Point, end: Point, bend: float = 0.0) -> list[Point]:
    """Return a cubic curve that leaves and arrives level, and bends up or down in between."""
    (x0, y0), (x1, y1) = start, end
    t = np.linspace(0, 1, STEPS)
    weights = np.stack([(1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3])
    reach = (x1 - x0) / 2
    corners = np.array([(x0, y0), (x0 + reach, y0 + bend), (x1 - reach, y1 + bend), (x1, y1)])
    return [(float(x), float(y)) for x, y in weights.T @ corners]


class Labels:
    """The shares beside edges, clear of boxes, nodes, other labels and all edges of a view.

    A label is as large as in a printed column, where the circuit is smallest.

    Args:
        places: the circuit's nodes.
        nodes: the trace of the nodes; small circuits have labels below them.
        paths: the points of each edge.
        widths: the width of each edge, px.
        views: the views that show each edge.
    """

    def __init__(
        self,
        places: Mapping[str, Point],
        nodes: Trace,
        paths: Mapping[Hashable, Sequence[Point]],
        widths: Mapping[Hashable, float],
        views: Views,
    ) -> None:
        low, high = x_range(places)
        self.across = (high - low) / PHONE  # a px of the horizontal axis
        self.width = LETTER[0] * self.across
        self.height = LETTER[1] * PIXEL
        self.paths, self.widths, self.views = paths, widths, views
        lefts = [places[name][0] for name in boxes_of(places)]
        self.fixed: list[Box] = [(left, left - 2 * LEFT, *BOX) for left in lefts]
        if "text" in nodes["mode"]:
            points = zip(nodes["x"], nodes["y"], nodes["text"], strict=True)
            self.fixed += [self._box((x, y - 1.5 * self.height), text) for x, y, text in points]
        self.taken: dict[str, list[Box]] = {}
        self.texts: dict[str, list[tuple[float, float, str]]] = {}  # with the point below each

    def _box(self, point: Point, text: str) -> Box:
        """Return the left, right, lower and upper end of a label above a point."""
        lines, (x, y) = text.split("<br>"), point
        half = self.width * max(map(len, lines)) / 2
        return x - half, x + half, y, y + self.height * len(lines)

    def place(self, view: str, at: Hashable, text: str) -> bool:
        """Return whether a label has a place at an edge, near its middle; it is taken then.

        The place is above the edge, or beside it where it is steep.

        Args:
            view: the view.
            at: the edge.
            text: the label.
        """
        path, taken = self.paths[at], self.taken.setdefault(view, [*self.fixed])
        others = [
            np.array(self.paths[other])
            for other, shown_in in self.views.items()
            if other != at and view in shown_in
        ]
        crossed, line = np.concatenate([*others, np.empty((0, 2))]), np.array(path)
        half = 0.4 * self.widths[at]  # px of its own edge, a little less
        if len(path) == 2:  # an encoding's edge has its label at its upper end
            boxes, line = [self._box(path[0], text)], line[:0]
        else:
            middle = line[:, 0].mean()
            nearest = sorted(path[2:-2], key=lambda point: abs(point[0] - middle))
            up = self.widths[at] / 2 * PIXEL
            raised = up + self.height / 2  # clear of an edge that begins at the same writer
            boxes = [self._box((x, y + lift), text) for lift in (up, raised) for x, y in nearest]
            boxes += [box for point in nearest for box in self._beside(point, at, text)]
        for own in boxes:
            left, right, low, high = own
            x, y = half * self.across, half * PIXEL
            is_over = _hit((left - x, right + x, low - y, high + y), line) or _hit(own, crossed)
            if not is_over and not any(_overlap(own, other) for other in taken):
                taken.append(own)
                return True
        return False

    def _beside(self, point: Point, at: Hashable, text: str) -> list[Box]:
        """Return the ends of a label to the right and to the left of a point of a steep edge."""
        left, right, low, high = self._box((point[0], point[1] - self.height / 2), text)
        near = (right - left) / 2 + (self.widths[at] / 2 + NEAR) * self.across
        far = near + 2 * NEAR * self.across
        return [(left + x, right + x, low, high) for x in (near, -near, far, -far)]

    def write(self, views: Iterable[str], text: str) -> None:
        """Write a label at the last place of some views."""
        for view in views:
            left, right, y, _ = self.taken[view][-1]
            self.texts.setdefault(view, []).append(((left + right) / 2, y, text))

    def traces(self) -> list[tuple[Trace, set[str]]]:
        """Return a trace of each view, with the labels of the edges that writers have."""
        traces = []
        for view, texts in self.texts.items():
            x, y, words = map(list, zip(*texts, strict=True))
            trace: Trace = {
                "type": "scatter",
                **{"x": x, "y": y, "text": words, "mode": "text", "textposition": "top center"},
                "textfont": LABEL_FONT,
                "hoverinfo": "skip",
                "cliponaxis": False,
                "showlegend": False,
            }
            traces.append((trace, {view}))
        return traces


def _overlap(one: Box, other: Box) -> bool:
    (left, right, low, high), (left2, right2, low2, high2) = one, other
    return left < right2 and left2 < right and low < high2 and low2 < high


def _hit(box: Box, points: np.ndarray) -> bool:
    """Return whether a point lies inside a box."""
    (left, right, low, high), (x, y) = box, points.T
    return bool(((left < x) & (x < right) & (low < y) & (y < high)).any())
