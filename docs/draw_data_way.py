"""Draw the way of the data from tokens to the page: python docs/draw_data_way.py.

It writes docs/images/data-way.svg, which docs/glossary.md shows.
"""

from html import escape
from pathlib import Path

from draw_imports import STYLE

OUT = Path(__file__).parent / "images" / "data-way.svg"
# Each step: its name, what it holds, and the file that makes it.
STEPS = (
    ("tokens", "sequences of equal length", "data/sequences.py"),
    ("forward pass", "q, k and the mask of each block", "hooks/layers/tap.py"),
    ("sums by fold", "q·k over sequences and heads", "hooks/reading/accumulators.py"),
    ("maps", "fold means, in memory or in a file", "maps/maps.py, maps/layers.py"),
    ("pattern", "less each row's mean over j < i", "maps/layers.py"),
    ("estimates", "on all folds, then without each", "analyses/, maps/estimates.py"),
    ("tables", "values, bounds and replicates", "studies/COMMAND_run.py"),
    ("report", "sentences, tables, figures", "studies/COMMAND.py"),
)
# What joins the way next to a step: its name, and the file that makes it.
ASIDES = {
    1: ("an ablation edits the pass", "hooks/ablation.py"),
    2: ("the checkpoint keeps the sums", "run/checkpoint.py"),
    6: ("the run's folder keeps the tables", "run/folder.py"),
    7: ("page, terminal, --image", "reports/page.py"),
}
WIDTH, BOX_X, BOX_WIDTH, BOX, ROW, TOP = 760, 20, 430, 48, 74, 12
ASIDE_X = 520


def main() -> None:
    OUT.write_text(svg(), encoding="utf-8")


def svg() -> str:
    """Return the picture."""
    height = TOP + (len(STEPS) - 1) * ROW + BOX + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The way of the data from tokens to the page">',
        f"<style>{STYLE}.left {{ text-anchor: start; }}</style>",
        '<defs><marker id="tip" markerWidth="7" markerHeight="6" refX="6.5" refY="3" '
        'orient="auto"><path d="M0,0 L7,3 L0,6 z"/></marker></defs>',
    ]
    middle = BOX_X + BOX_WIDTH / 2
    for index, (name, holds, file) in enumerate(STEPS):
        y = TOP + index * ROW
        lines += [
            f'<rect class="box" x="{BOX_X}" y="{y}" width="{BOX_WIDTH}" height="{BOX}" rx="7"/>',
            f'<text class="name" x="{middle:g}" y="{y + 20}">{name}</text>',
            f'<text class="what" x="{middle:g}" y="{y + 37}">{escape(holds)} · {file}</text>',
        ]
        if index + 1 < len(STEPS):
            lines.append(f'<path class="arrow" d="M{middle:g},{y + BOX} V{y + ROW}"/>')
        if index in ASIDES:
            says, file = ASIDES[index]
            ends = (BOX_X + BOX_WIDTH, ASIDE_X - 8)
            start, end = ends if index > 1 else ends[::-1]
            lines += [
                f'<path class="arrow" d="M{start},{y + BOX / 2:g} H{end}"/>',
                f'<text class="what left" x="{ASIDE_X}" y="{y + 21}">{says}</text>',
                f'<text class="what left" x="{ASIDE_X}" y="{y + 37}">{file}</text>',
            ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
