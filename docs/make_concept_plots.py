"""Draw the plots of docs/guide/concepts.md: python docs/make_concept_plots.py.

Each is made by the functions that it illustrates, on made-up documents.
"""

import torch
from make_concept_images import OUT, TEXT
from torch import Tensor

from nope_probe.analyses.behaviour import (
    Losses,
    mean_interval,
    parts_of,
    position_means,
    span_loss,
)

LEFT, TOP, WIDTH, HEIGHT, RIGHT = 54, 16, 380, 170, 150
HIT, MISS = "#0969da", "#c4321f"
SMALL = f'{TEXT} font-size="11"'
N_DOCUMENTS, N_TOKENS = 24, 64
N_RUNS, TRUTH = 20, 0.5


def main() -> None:
    (OUT / "behaviour.svg").write_text(losses(), encoding="utf-8")
    (OUT / "intervals.svg").write_text(intervals(), encoding="utf-8")


def losses() -> str:
    """Return the loss at each position of a model that uses its context, and of one without."""
    noise = torch.Generator().manual_seed(1)
    documents = torch.randn(N_DOCUMENTS, 1, generator=noise) * 0.2
    falling = 2.8 + 1.4 * torch.exp(-torch.arange(1, N_TOKENS) / 12)
    curves = {"intact": (falling, HIT), "part removed": (torch.full_like(falling, 4.0), MISS)}
    drawn = []
    for name, (curve, colour) in curves.items():
        tokens = torch.randn(N_DOCUMENTS, N_TOKENS - 1, generator=noise) * 0.35
        drawn.append(loss_curve(curve + documents + tokens, name, colour))
    rows = {f"{value:.1f}": (4.6 - value) / 2.1 for value in (2.5, 3.0, 3.5, 4.0, 4.5)}
    columns = {f"{value}": value / N_TOKENS for value in (0, 20, 40, 60)}
    return svg("loss, nats", "position", rows, columns, drawn)


def loss_curve(values: Losses, name: str, colour: str) -> str:
    """Return the mean over documents with its band, and next to it the in-context gain."""
    parts, means = parts_of(N_TOKENS), position_means(values)
    gain = mean_interval(span_loss(values, *parts["early"]) - span_loss(values, *parts["late"]))
    x = torch.arange(1, N_TOKENS) / N_TOKENS
    value, low, high = ((4.6 - curve) / 2.1 for curve in (means.value, means.low, means.high))
    band = points(torch.cat([x, x.flip(0)]), torch.cat([low, high.flip(0)]))
    ends = [round(end, 2) + 0.0 for end in (gain.value, gain.low, gain.high)]  # no -0.00
    words = [name, "in-context gain", "{:.2f} [{:.2f}, {:.2f}]".format(*ends)]
    end = value[-10:].mean().item()
    labels = [text(WIDTH + 10, end, word, "start", 15 * at - 8) for at, word in enumerate(words)]
    curve = (
        f'<polyline points="{points(x, value)}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )
    return "\n".join([f'<polygon points="{band}" fill="{colour}" opacity="0.2"/>', curve, *labels])


def intervals() -> str:
    """Return the intervals of one number in runs on different documents, and what it truly is."""
    noise = torch.Generator().manual_seed(5)
    drawn, missed = [line(0, 0.5, 1, 0.5, "#222", 'stroke-dasharray="4 3"')], 0
    for run in range(N_RUNS):
        found = mean_interval(TRUTH + 0.25 * torch.randn(N_DOCUMENTS, generator=noise))
        value, low, high = (
            0.5 - (end - TRUTH) / 0.5 for end in (found.value, found.low, found.high)
        )
        misses = not found.low <= TRUTH <= found.high
        missed += misses
        colour, x = MISS if misses else HIT, (run + 0.5) / N_RUNS
        drawn.append(line(x, low, x, high, colour, 'stroke-width="2"'))
        drawn.append(
            f'<circle cx="{LEFT + WIDTH * x:.1f}" cy="{TOP + HEIGHT * value:.1f}" r="3.5" '
            f'fill="{colour}"/>'
        )
    for at, words in enumerate(("true value", f"{missed} of {N_RUNS} intervals", "miss it")):
        drawn.append(text(WIDTH + 10, 0.5, words, "start", 4 + 16 * at))
    rows = {f"{value:.2f}": 0.5 - (value - TRUTH) / 0.5 for value in (0.3, 0.4, 0.5, 0.6, 0.7)}
    columns = {f"{run}": (run - 0.5) / N_RUNS for run in (1, 5, 10, 15, 20)}
    return svg("mean, nats", "run, each on other documents", rows, columns, drawn)


def svg(
    y_title: str, x_title: str, rows: dict[str, float], columns: dict[str, float], drawn: list[str]
) -> str:
    """Return a picture of one panel; ticks and marks are placed from 0 to 1, from the top left."""
    ticks = [text(-6, y, word, "end") for word, y in rows.items()]
    ticks += [text(WIDTH * x, 1, word, "middle", 15) for word, x in columns.items()]
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + 40
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = "\n".join([*(line(0, y, 1, y, "#e4e6ea", "") for y in rows.values()), *ticks, *drawn])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{parts}\n'
        f'<text x="{LEFT + WIDTH / 2}" y="{height - 8}" text-anchor="middle" {SMALL}>{x_title}'
        f'</text>\n<text transform="translate(14 {TOP + HEIGHT / 2}) rotate(-90)" '
        f'text-anchor="middle" {SMALL}>{y_title}</text>\n</svg>\n'
    )


def text(x: float, y: float, words: str, anchor: str, down: float = 4) -> str:
    """Return words at x px from the panel's left, and at a part y of its height."""
    place = f'x="{LEFT + x:.0f}" y="{TOP + HEIGHT * y + down:.0f}"'
    return f'<text {place} text-anchor="{anchor}" {SMALL}>{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str) -> str:
    start = f'x1="{LEFT + WIDTH * x1:.1f}" y1="{TOP + HEIGHT * y1:.1f}"'
    end = f'x2="{LEFT + WIDTH * x2:.1f}" y2="{TOP + HEIGHT * y2:.1f}"'
    return f'<line {start} {end} stroke="{colour}" {more}/>'


def points(x: Tensor, y: Tensor) -> str:
    pairs = zip((LEFT + WIDTH * x).tolist(), (TOP + HEIGHT * y).tolist(), strict=True)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs)


if __name__ == "__main__":
    main()
