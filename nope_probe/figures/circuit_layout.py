"""The layout of the circuit figure: the panels of a block's stages and the arrows between them.

Points are (share of the width, px from the top). An arrow has the name of the stage at its end;
`x_e` and `e_g` belong to the residual stream, and `_g` is the part of (g)'s arrow after the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nope_probe.figures.names import TABLE
from nope_probe.figures.style import ZERO, Extent, Layout
from nope_probe.removal import INK
from nope_probe.stages import LETTERS

Point = tuple[float, float]
Operation = tuple[str, str | None]
_SCORE: tuple[Operation, ...] = (
    ("W<sub>Q</sub>", "w_q"),
    ("W<sub>K</sub>", "w_k"),
    ("RoPE", "rope"),
)
_NORM: Operation = ("weights", "norms")  # of an LN, named only if its weights are removed
# The operations of each arrow, and the component whose removal removes them.
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "a": (("LN", None), _NORM),
    "b": _SCORE,
    "c": (("mask", "mask"), ("softmax", None), ("W<sub>V</sub>", "w_v")),
    "d": (("W<sub>O</sub>", "w_o"),),
    "e": (),
    "f": (("LN", None), _NORM),
    "g": (("FFN", "mlp"),),
    "_g": (),
    "h": (("next LN", None), _NORM),
    "i": _SCORE,
    "x_e": (("residual", None),),
    "e_g": (("residual", None),),
}
PANEL = 168  # px
MENU = 44  # height of the switches above the figure, px
TITLE, BAR, BELOW = 24.0, 44.0, 74.0  # above a panel; from a panel to its bar, and past it
_SHARE, _END = 0.15, 0.975  # a panel's width, and the end of the last panel
_GAP = (_END - 5 * _SHARE) / 4
_CHANNEL = 46
_SECOND = TITLE + PANEL + BELOW + _CHANNEL + TITLE  # the second row's panels
_MIDDLE, _LOWER = TITLE + PANEL / 2, _SECOND + PANEL / 2
_JOIN, _FLOOR = TITLE + PANEL + BELOW + _CHANNEL / 2 - 8, _SECOND + PANEL + BELOW + 4
_COLUMN = {letter: 1 + i for i, letter in enumerate("abcd")}
_COLUMN |= {letter: i for i, letter in enumerate("efghi")}
_LEFT = {letter: column * (_SHARE + _GAP) for letter, column in _COLUMN.items()}
_X, _PLUS, _BRANCH = 0.85 * _SHARE, _LEFT["g"] - 0.3 * _GAP, _LEFT["f"] - 0.8 * _GAP
MARGIN = {"t": 60 + MENU, "b": 16, "l": 56, "r": 16}  # around the plotting area, px
LABELLED = "e"  # the panel that names the axes and has ticks at its queries


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The places of panels and arrows.

    Attributes:
        height: height of the plotting area, px.
        tops: distance of each panel from the top, px.
        columns: each panel's horizontal extent.
        paths: each arrow's corners.
        labels: the point of each arrow's words, and their horizontal and vertical anchors.
        x: the point of the input.
        joins: the points at which outputs are added to the residual stream.
    """

    height: float
    tops: Mapping[str, float]
    columns: Mapping[str, Extent]
    paths: Mapping[str, Sequence[Point]]
    labels: Mapping[str, tuple[Point, str, str]]
    x: Point
    joins: tuple[Point, ...]

    def share(self, px: float) -> float:
        """Return plotly's share of the height from the bottom, for px from the top."""
        return 1 - px / self.height

    def domain(self, letter: str) -> tuple[Extent, Extent]:
        """Return a panel's horizontal and vertical extent, as shares of the plotting area."""
        top = self.tops[letter]
        across = self.columns[letter]
        return across, (max(0.0, self.share(top + PANEL)), self.share(top))


def block_flow() -> Flow:
    """Return the layout of a block: attention in the first row, the rest in the second."""
    row: dict[str, float] = {s: _MIDDLE if s in "abcd" else _LOWER for s in LETTERS}
    paths: dict[str, Sequence[Point]] = {
        letter: [(_LEFT[letter] - _GAP, row[letter]), (_LEFT[letter], row[letter])]
        for letter in "bcdfhi"
    }
    out, edge = _LEFT["d"] + _SHARE, 0.995
    paths |= {
        "a": [(_X + 0.012, _MIDDLE), (_LEFT["a"], _MIDDLE)],
        "e": [(out, _MIDDLE), (edge, _MIDDLE), (edge, _JOIN), (_X, _JOIN), (_X, _SECOND)],
        "x_e": [(_X, _MIDDLE + 12), (_X, _JOIN - 7)],
        "g": [(_LEFT["g"] - _GAP, _LOWER), (_PLUS - 0.006, _LOWER)],
        "_g": [(_PLUS, _LOWER), (_LEFT["g"], _LOWER)],
        "e_g": [(_BRANCH, _LOWER), (_BRANCH, _FLOOR), (_PLUS, _FLOOR), (_PLUS, _LOWER + 7)],
    }
    middles = {letter: _LEFT[letter] - _GAP / 2 for letter in "bcdfhi"}
    middles |= {"a": (_X + _LEFT["a"]) / 2, "g": _LEFT["g"] - 0.66 * _GAP}
    labels = {
        letter: ((middle, row[letter] - 6), "center", "bottom")
        for letter, middle in middles.items()
    }
    labels["x_e"] = ((_X - 0.006, (_MIDDLE + _JOIN) / 2), "right", "middle")
    labels["e_g"] = ((_LEFT["f"] + _SHARE / 2, _FLOOR + 2), "center", "top")
    return Flow(
        height=_FLOOR + 18,
        tops={letter: TITLE if letter in "abcd" else _SECOND for letter in LETTERS},
        columns={letter: (left, left + _SHARE) for letter, left in _LEFT.items()},
        paths=paths,
        labels=labels,
        x=(_X, _MIDDLE),
        joins=((_X, _JOIN), (_PLUS, _LOWER)),
    )


def arrows(
    flow: Flow, has: Collection[str], removed: Collection[str], absent: Collection[str]
) -> tuple[list[Layout], list[Layout]]:
    """Return the arrows: lines as shapes; arrowheads, words and crosses as annotations.

    Args:
        flow: the layout.
        has: the model's components; operations of other components are left out.
        removed: components that are removed: their words and arrows are struck through.
        absent: stages that the block lacks; arrows to them are faint and have no words.
    """
    shapes, marks = [], [_text(flow, flow.x, "<b>X</b>", size=16)]
    for name, points in flow.paths.items():
        faint = name[-1] in absent
        operations = [(w, c) for w, c in OPERATIONS[name] if c is None or c in has or c in removed]
        gone = [component for _, component in operations if component in removed]
        colour = ZERO if faint else TABLE[gone[0] or ""].colour if gone else INK
        opacity = 0.35 if faint else 1.0
        shapes.append(_line(flow, points, colour, dashed=bool(gone), opacity=opacity))
        marks.append(_head(flow, points, colour, opacity))
        if operations and not faint:
            at, across, down = flow.labels[name]
            words = "<br>".join(f"<s>{w}</s>" if c in removed else w for w, c in operations)
            marks.append(_text(flow, at, words, size=11, xanchor=across, yanchor=down))
        if gone and not faint:
            (x0, y0), (x1, y1) = points[:2]
            middle = (x0 + x1) / 2, (y0 + y1) / 2
            marks.append(_text(flow, middle, "<b>✕</b>", size=18, color=colour))
    return shapes, [*marks, *(_text(flow, join, "⊕", size=20) for join in flow.joins)]


def _line(flow: Flow, points: Sequence[Point], colour: str, dashed: bool, opacity: float) -> Layout:
    corners = " L ".join(f"{x:.4f},{flow.share(y):.5f}" for x, y in points)
    line = {"color": colour, "width": 1.5, "dash": "dot" if dashed else "solid"}
    where = {"xref": "paper", "yref": "paper", "layer": "above"}
    return {"type": "path", "path": f"M {corners}", "line": line, "opacity": opacity, **where}


def _head(flow: Flow, points: Sequence[Point], colour: str, opacity: float) -> Layout:
    (x0, y0), (x1, y1) = points[-2:]
    across, down = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    arrow = {"showarrow": True, "arrowhead": 2, "arrowwidth": 1.5, "arrowcolor": colour}
    back = {"ax": -9 * across if y0 == y1 else 0, "ay": -9 * down, "text": "", "opacity": opacity}
    return {"x": x1, "y": flow.share(y1), "xref": "paper", "yref": "paper", **arrow, **back}


def _text(flow: Flow, at: Point, words: str, **style: Any) -> Layout:
    font = {key: style.pop(key) for key in ("size", "color") if key in style}
    where = {"x": at[0], "y": flow.share(at[1]), "xref": "paper", "yref": "paper"}
    anchors = {"xanchor": "center", "yanchor": "middle"}
    return {"text": words, "font": font, "showarrow": False, **where, **anchors, **style}
