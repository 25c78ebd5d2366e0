"""Measure who makes lead and pattern in all layers of SmolLM2: python docs/make_sources.py FOLDER.

Each command of `COMMANDS` runs into one folder in FOLDER, unless it is finished there:
other texts and first tokens. Writes docs/sources.csv (ten minutes on two cores, after
`make real`) and a picture, and prints the table of findings.md. Without FOLDER it prints the table
of what is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from make_long_sequences import markdown
from make_smollm2 import IMAGES, NAME, WHERE, Told, estimate, finished, of, told_rows

from nope_probe import figures
from nope_probe.figures.dots import Dots, over_layers

ALL_LAYERS = f"ablate --model {NAME} --layers all --remove sources"
COMMANDS = {
    "code": f"{ALL_LAYERS} --n-seqs 96",
    "prose": f"{ALL_LAYERS} --n-seqs 96 --data prose",
    "<|endoftext|>": f'{ALL_LAYERS} --n-seqs 48 --bos "<|endoftext|>"',
    "<|im_start|>": f'{ALL_LAYERS} --n-seqs 48 --bos "<|im_start|>"',
}
TITLES = {  # of the rows of the table
    "code": "Python source, any token first",
    "prose": "English prose, any token first",
    "<|im_start|>": "the token im_start first",
    "<|endoftext|>": "the token endoftext first",
}
FIRST = {  # of the panels of the picture, by run
    "code": "any token first",
    "<|im_start|>": "<|im_start|> first",
    "<|endoftext|>": "<|endoftext|> first",
}
TOLD: list[Told] = [
    ("sources", ("of", "source"), ("lost",)),
    ("pattern", ("removed",), ("lead", "amplitude")),
    ("terms", ("of", "term"), ("size",)),
]
NAMES = ("lead mask", "lead rope", "pattern mask", "pattern rope", "intact")
STORED = Path(__file__).parent / "sources.csv"
PICTURE = IMAGES / "first_token_smollm2.png"
HALF = 0.5  # of a lead or pattern: a layer that loses more without a source needs it
LAYER = 3  # whose numbers the table has


def measure(folder: Path) -> pd.DataFrame:
    """Return all estimates that are told, a row each, in nats or as a share."""
    runs = {
        name: finished(folder / f"sources-{number}", command)
        for number, (name, command) in enumerate(COMMANDS.items())
    }
    stored = told_rows(runs, dict.fromkeys(runs, TOLD))
    kept = stored["name"].isin((*NAMES, "lead without_sources"))
    return stored[kept][[*WHERE, "value", "low", "high"]]


def draw(stored: pd.DataFrame) -> None:
    """Draw the lead of every layer by first token, intact and without any source."""
    panels = {}
    for run, title in FIRST.items():
        rows = of(stored, run=run)
        panels[f"{title}: lead, nats"] = [
            Dots(estimates(of(rows, name="intact", measure="lead")), "intact", "size", "intact"),
            Dots(
                estimates(of(rows, name="lead without_sources", measure="size")),
                "without_sources",
                "size",
                "without any source",
            ),
        ]
    title = "The first key's lead in SmolLM2-135M, by first token"
    figures.save(over_layers(panels, title, same_y=[range(len(panels))]), PICTURE)


def estimates(rows: pd.DataFrame) -> pd.DataFrame:
    """Return stored rows with the columns of an estimate."""
    names = {"value": "size", "low": "size_low", "high": "size_high"}
    return rows[["layer", *names]].rename(columns=names)


def needing(rows: pd.DataFrame, question: str, source: str) -> int:
    """Return how many layers lose more than half of a lead or pattern without a source."""
    return int((of(rows, name=f"{question} {source}", measure="lost")["value"] > HALF).sum())


def tables(stored: pd.DataFrame) -> list[str]:
    """Return the page's tables in Markdown."""
    lines = {}
    for run, title in TITLES.items():
        rows = of(stored, run=run)
        at = of(rows, layer=LAYER)
        counts = [
            f"{needing(rows, question, source)} of {rows['layer'].nunique()}"
            for question, source in (("pattern", "rope"), ("lead", "mask"))
        ]
        lead = estimate(of(at, name="intact", measure="lead"), ".2f")
        left = estimate(of(at, name="lead without_sources", measure="size"), ".2f")
        losses = [
            estimate(of(at, name=name, measure="lost"), "z.0f", 100)
            for name in ("lead mask", "pattern rope")
        ]
        lines[title] = [*counts, lead, left, *losses]
    columns = [
        "layers whose other keys need RoPE",
        "layers whose lead needs the mask",
        f"L{LAYER}'s lead, nats",
        "of it without any source",
        "lost without the mask, %",
        f"L{LAYER}'s pattern, lost without RoPE, %",
    ]
    return [markdown("", columns, lines)]


def sentences(stored: pd.DataFrame) -> dict[str, list[str]]:
    """Return the statements with numbers that README and the page make outside of tables."""
    code = of(stored, run="code")
    fewest = min(needing(of(stored, run=run), "pattern", "rope") for run in COMMANDS)
    n_layers, of_mask = code["layer"].nunique(), needing(code, "lead", "mask")
    ended = of(stored, run="<|endoftext|>")
    lead = of(ended, name="intact", measure="lead")["value"].mean()
    left = of(ended, name="lead without_sources", measure="size")["value"].mean()
    layers = f"{fewest} or more" if fewest < n_layers else "all"
    told = [
        f"RoPE makes the order of the other keys in {layers} of the {n_layers} layers",
        f"the mask makes the first key's lead in {of_mask} of {n_layers}",
        f"{left:.1f} of {lead:.1f} nats (means over layers) are left without any source",
    ]
    return {"README.md": told, "docs/findings.md": told}


def main(*arguments: str) -> None:
    if arguments:
        stored = measure(Path(arguments[0]).resolve())
        stored.to_csv(STORED, index=False, float_format="%.5g")
        draw(stored)
    for table in tables(pd.read_csv(STORED)):
        print(table, end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
