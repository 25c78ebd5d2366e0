"""Measure the shipped twins for findings.md and trace.md: python docs/make_twins.py FOLDER.

Each command of `COMMANDS` runs into one folder in FOLDER, unless it is finished there.
Writes docs/twins.csv (five minutes on two cores), draws `PICTURE` from the same runs (needs
Chrome or Chromium), and prints the tables of the pages. Without FOLDER it prints the tables of
what is stored.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from make_long_sequences import markdown
from make_smollm2 import IMAGES, WHERE, Told, finished, of, told_rows
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from plotly.subplots import make_subplots

from nope_probe import row_centred
from nope_probe.run.folder import Run

TWINS = ("nope-tiny", "rope-tiny")
KINDS = {
    "sources": "ablate --model {} --remove sources --n-seqs 3456",
    "trace": "trace --model {} --seq-len 96 --n-seqs 512",
}
COMMANDS = {f"{kind} {model}": KINDS[kind].format(model) for kind in KINDS for model in TWINS}
COMMANDS["effects"] = f"{COMMANDS['trace nope-tiny']} --reader L1"
EFFECTS_TOLD = ("effects", ("of", "writer"), ("predicted", "held", "direct", "total"))
# What is told of a run, as in `make_smollm2`; `sources` are drawn alone.
TOLD: dict[str, list[Told]] = {
    "trace": [
        ("terms", ("of", "term"), ("size", "part", "non_relative")),
        ("writers", ("of", "side", "writer"), ("part",)),
        EFFECTS_TOLD,
    ],
    "effects": [EFFECTS_TOLD],
}
STORED = Path(__file__).parent / "twins.csv"
PICTURE = IMAGES / "twins.png"
CHECKPOINTS = Path(__file__).parent.parent / "nope_probe" / "checkpoints"
LAYER = 2  # of the picture of both twins
TERMS = {
    "rotation": "rotation",
    "written_key": "written into keys",
    "written_query": "into queries",
    "written_both": "into both",
    "covariance": "covariance",
}
WRITERS = [(1, "MLP0"), (1, "L0H0"), (1, "L0H1"), (2, "L1H0"), (2, "L1H1"), (2, "MLP1")]
EFFECTS = {
    "predicted": "with queries",
    "held": "lost, scale held",
    "direct": "lost in the model",
    "total": "lost on all paths",
}


def measure(folder: Path) -> None:
    """Write all estimates that are told, a row each, in nats or as a share; draw the pictures."""
    runs = {
        name: finished(folder / name.replace(" ", "-"), command)
        for name, command in COMMANDS.items()
    }
    told = {name: TOLD.get(name.split()[0], ()) for name in runs}
    stored = told_rows(runs, told)[[*WHERE, "value", "low", "high"]]
    stored.to_csv(STORED, index=False, float_format="%.5g")
    draw_twins([runs[f"sources {model}"] for model in TWINS])
    sign(PICTURE)


def draw_twins(runs: Iterable[Run]) -> None:
    """Draw the positional patterns of both models, intact and without the mask."""
    titles = [
        f"{model}, L{LAYER}, {what}" for model in TWINS for what in ("intact", "without mask")
    ]
    figure = make_subplots(1, 4, subplot_titles=titles, horizontal_spacing=0.04)
    for index, run in enumerate(runs):
        patterns = [pattern(run.maps[f"score/{removed}"]) for removed in ("intact", "mask")]
        limit = np.nanquantile(np.abs(patterns[0]), 0.99)
        for column, values in enumerate(patterns):
            bar = {"title": "nats", "x": 0.475 + 0.53 * index, "thickness": 10}
            colours = {"zmin": -limit, "zmax": limit, "colorscale": "RdBu_r", "colorbar": bar}
            trace = go.Heatmap(z=values, showscale=column == 1, **colours)
            figure.add_trace(trace, 1, 1 + 2 * index + column)
    figure.update_yaxes(autorange="reversed", constrain="domain", scaleanchor="x")
    figure.update_xaxes(title="key position", constrain="domain")
    figure.update_yaxes(title="query position", row=1, col=1)
    margin = {"t": 40, "b": 50, "l": 60, "r": 60}
    figure.update_layout(width=1200, height=330, margin=margin, template="plotly_white")
    figure.write_image(PICTURE)


def pattern(score: np.ndarray) -> np.ndarray:
    return row_centred(torch.from_numpy(score[LAYER]), skip_keys=1).numpy()


def sign(path: Path) -> None:
    """Write into a picture which numbers were stored when it was drawn."""
    text = PngInfo()
    text.add_text(STORED.name, signature())
    Image.open(path).save(path, pnginfo=text)


def signature() -> str:
    """Return the checksum of what is stored."""
    return hashlib.sha256(STORED.read_bytes()).hexdigest()


def tables(stored: pd.DataFrame) -> list[str]:
    """Return the pages' tables in Markdown."""
    return [strengths(stored), terms(stored, "pattern"), writers(stored)]


def strengths(stored: pd.DataFrame) -> str:
    """Return the table of the losses of the intact models, and the sizes of their patterns."""
    lines = {}
    for model in TWINS:
        record = json.loads((CHECKPOINTS / model / "training.json").read_text(encoding="utf-8"))
        own = of(stored, run=f"trace {model}", name="pattern all", measure="size")
        sizes = [f"{value:.2f}" for value in own.sort_values("layer")["value"]]
        lines[f"`{model}`"] = [f"{record['held_out_loss']:.3f}", *sizes]
    columns = ["held-out loss, nats", *(f"pattern of L{layer}, nats" for layer in range(4))]
    return markdown("model", columns, lines)


def terms(stored: pd.DataFrame, question: str) -> str:
    """Return the table of the terms of both models' leads or patterns."""
    readers = [(model, layer) for model in TWINS for layer in (1, 2, 3)]
    columns = [f"{model} L{layer}" if layer == 1 else f"L{layer}" for model, layer in readers]

    def row(name: str, measure: str) -> list[pd.Series]:
        own = of(stored, name=f"{question} {name}", measure=measure)
        return [of(own, run=f"trace {model}", layer=layer).iloc[0] for model, layer in readers]

    lines = {"whole": [f"{estimate['value']:.2f}" for estimate in row("all", "size")]}
    for name, label in TERMS.items():
        lines[label] = [f"{estimate['value']:z.2f}" for estimate in row(name, "part")]
    return markdown(f"{question}, nats", columns, lines)


def writers(stored: pd.DataFrame) -> str:
    """Return the table of what writers write, and of what is lost without their position, nats."""
    lines = {}
    for layer, writer in WRITERS:
        own, traced = of(stored, layer=layer), "trace nope-tiny"
        parts = [of(own, run=traced, name=f"pattern key {writer}", measure="part")]
        own = of(own, run="effects" if layer == 1 else traced, name=f"pattern {writer}")
        parts += [of(own, measure=measure) for measure in EFFECTS]
        lines[f"L{layer}, {writer}"] = [f"{part['value'].item():z.2f}" for part in parts]
    return markdown("reader, writer, nats", ["into keys", *EFFECTS.values()], lines)


def sentences(stored: pd.DataFrame) -> dict[str, list[str]]:
    """Return the statements with numbers that the pages make outside of tables."""

    def rows(run: str, name: str, measure: str, layers: Sequence[int]) -> list[pd.Series]:
        own = of(stored, run=run, name=name, measure=measure)
        return [of(own, layer=layer).iloc[0] for layer in layers]

    def value(run: str, name: str, measure: str, layer: int) -> float:
        return float(rows(run, name, measure, (layer,))[0]["value"])

    nope, rope = (f"trace {model}" for model in TWINS)
    means = {
        run: [
            f"{mean['value']:z.2f} of {whole['value']:.2f}"
            for mean, whole in zip(
                rows(run, "pattern mean", "part", layers),
                rows(run, "pattern all", "size", layers),
                strict=True,
            )
        ]
        for run, layers in ((nope, (1, 2, 3)), (rope, (0, 1, 2, 3)))
    }
    rotated = rows(rope, "pattern rotation", "non_relative", range(4))
    of_rotation = max(row["value"] for row in rotated)
    head, gone = (
        f"{value('effects', 'pattern L0H0', measure, 1):.3f}" for measure in ("predicted", "total")
    )
    whole = f"{value(nope, 'pattern all', 'size', 1):.2f}"
    return {
        "docs/findings.md": [
            f"makes {listed(means[nope])} nats of the patterns of `nope-tiny`'s L1 to L3,",
            f"and {listed(means[rope])} nats of those of `rope-tiny`'s L0 to L3",
        ],
        "docs/trace.md": [
            f"L0H0 writes {head} of the {whole} nats of L1's pattern, and its removal takes "
            f"{gone}.",
            f"rotation has a non-relative part of {of_rotation:.3f} nats in every layer of "
            f"`rope-tiny`; the {value(rope, 'pattern all', 'non_relative', 3):.3f} nats of L3",
        ],
    }


def listed(texts: Sequence[str]) -> str:
    """Return texts as a list in a sentence."""
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def main(*arguments: str) -> None:
    if arguments:
        measure(Path(arguments[0]).resolve())
    for table in tables(pd.read_csv(STORED)):
        print(table, end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
