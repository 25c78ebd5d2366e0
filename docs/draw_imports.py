"""Draw which folder of the package imports which: python docs/draw_imports.py.

It reads the code and writes docs/images/imports.svg, which CONTRIBUTING.md shows. Run it again when
a test says that the picture is out of date.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from import_rule import COMMANDS, EVERYWHERE, PUBLIC, ROOT, folder_imports, imports

OUT = ROOT / "docs" / "images" / "imports.svg"
# Where each folder stands: its row, its centre across, and what is in it.
PLACES = {
    COMMANDS: (0, 620, "ablate, scores, circuit, ..."),
    "studies": (1, 300, "what a command computes"),
    "reports": (2, 110, "the HTML page"),
    "run": (3, 720, "sessions and checkpoints"),
    "figures": (4, 110, "arrays to plotly"),
    "analyses": (4, 330, "what maps mean"),
    "data": (4, 540, "sequences of tokens"),
    "models": (4, 760, "names, loading, parity"),
    "hooks": (5, 560, "reading and writing through hook points"),
    "maps": (6, 330, "what maps are, and how they are kept"),
}
WIDTH, ROW, BOX, TOP = 910, 104, 48, 12
HALF = 88  # half of a box's width
WIDE = {"hooks": 170, "maps": 150}
GAP = 12  # between an arrow that passes a row and the boxes there
BELOW = (
    "errors.py and files.py may be imported everywhere, cli.py by commands; "
    "__init__.py names what is public."
)
STYLE = """
.box { fill: #dfe9f5; stroke: #4a77a8; }
.name { fill: #14263b; font: 600 15px system-ui, sans-serif; text-anchor: middle; }
.what { fill: #3d5470; font: 11.5px system-ui, sans-serif; text-anchor: middle; }
.note { fill: #7d8590; font: 12px system-ui, sans-serif; }
.arrow { fill: none; stroke: #7d8590; stroke-width: 1.4; marker-end: url(#tip); }
#tip path { fill: #7d8590; }
"""


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """An import of one folder by another."""

    start: str
    end: str


def main() -> None:
    OUT.write_text(svg())


def svg() -> str:
    """Return the picture of the imports that are in the code."""
    arrows = sorted(_arrows(), key=lambda arrow: (arrow.start, arrow.end))
    height = TOP + 6 * ROW + BOX + 34
    tip = '<path d="M0,0 L7,3 L0,6 z"/>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Which folder of the package imports which">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" markerWidth="7" markerHeight="6" refX="6.5" refY="3" '
        f'orient="auto">{tip}</marker></defs>',
        *(f'<path class="arrow" d="{_path(arrow, arrows)}"/>' for arrow in arrows),
        *(line for name in PLACES for line in _box(name)),
        f'<text class="note" x="{WIDTH - 16}" y="{height - 10}" text-anchor="end">{BELOW}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _arrows() -> Iterator[Arrow]:
    for start, ends in folder_imports(imports()).items():
        if start in (PUBLIC, "cli"):
            continue
        yield from (Arrow(start=start, end=end) for end in ends if end not in (*EVERYWHERE, "cli"))


def _half(name: str) -> int:
    return WIDE.get(name, HALF)


def _top(name: str) -> int:
    return TOP + PLACES[name][0] * ROW


def _box(name: str) -> Iterator[str]:
    _, x, what = PLACES[name]
    half, top = _half(name), _top(name)
    where = f'x="{x - half}" y="{top}" width="{2 * half}" height="{BOX}" rx="7"'
    yield f'<rect class="box" {where}/>'
    yield f'<text class="name" x="{x}" y="{top + 20}">{name}</text>'
    yield f'<text class="what" x="{x}" y="{top + 37}">{what}</text>'


def _path(arrow: Arrow, arrows: list[Arrow]) -> str:
    """Return the path of an arrow: down from a box, between those on its way, into another."""
    leaving = [each for each in arrows if each.start == arrow.start]
    coming = [each for each in arrows if each.end == arrow.end]
    x = _slot(arrow.start, [each.end for each in leaving], arrow.end)
    end = _slot(arrow.end, [each.start for each in coming], arrow.start)
    y, path = _top(arrow.start) + BOX, ""
    first, last = PLACES[arrow.start][0], PLACES[arrow.end][0]
    path = f"M{x:g},{y}"
    for row in range(first + 1, last):
        straight = x + (end - x) / (last - row + 1)
        passing = _free(row, straight)
        above, below = TOP + row * ROW - 4, TOP + row * ROW + BOX + 4
        path += _curve(x, y, passing, above) + f" L{passing:g},{below}"
        x, y = passing, below
    return path + _curve(x, y, end, _top(arrow.end))


def _slot(name: str, others: list[str], other: str) -> float:
    """Return where on a box's edge the arrow from or to another box stands."""
    ordered = sorted(others, key=lambda each: (PLACES[each][1], PLACES[each][0]))
    share = (ordered.index(other) + 1) / (len(ordered) + 1)
    return round(PLACES[name][1] + _half(name) * (2 * share - 1) * 0.9, 1)


def _free(row: int, x: float) -> float:
    """Return the place nearest to x at which an arrow passes a row between its boxes."""
    boxes = [(PLACES[name][1], _half(name)) for name in PLACES if PLACES[name][0] == row]
    if all(abs(x - centre) > half + GAP for centre, half in boxes):
        return round(x, 1)
    sides = [centre + sign * (half + GAP) for centre, half in boxes for sign in (-1, 1)]
    clear = [
        side for side in sides if all(abs(side - centre) >= half + GAP for centre, half in boxes)
    ]
    return min(clear, key=lambda side: abs(side - x))


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (y + to_y) / 2
    return f" C{x:g},{middle:g} {to_x:g},{middle:g} {to_x:g},{to_y:g}"


if __name__ == "__main__":
    main()
