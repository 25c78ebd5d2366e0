"""Measure the claims of all scripts, or of one: python recipes/claims/page.py [SCRIPT].

Writes docs/claims.md, docs/claims.csv and the figures of these scripts. With the word `draw` it
writes the page and all figures of what is stored.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from claims import overall, table
from nope_probe.figures.maps import export

DOCS = Path(__file__).parents[2] / "docs"
STORED, PAGE, IMAGES = DOCS / "claims.csv", DOCS / "claims.md", DOCS / "images" / "claims"
WORDS = tomllib.loads((Path(__file__).parent / "papers.toml").read_text(encoding="utf-8"))
CALLED = {"holds": "**holds**", "fails": "**fails**", "undecided": "undecided"}


def store(script: str) -> None:
    """Measure a script's claims in the models that it names, and store them with the others."""
    module, of_script = import_module(script), claims_of(script)
    measured = table([row for model in module.MODELS for row in module.rows_of(model)])
    parts = [measured]
    if STORED.is_file():
        stored = pd.read_csv(STORED, keep_default_na=False)
        parts.append(stored[~stored["claim"].isin(of_script)])
    order = [*WORDS["claims"]]
    rows = pd.concat(parts).sort_values(
        "claim", key=lambda names: names.map(order.index), kind="stable"
    )
    rows.to_csv(STORED, index=False, float_format="%.4g")
    print(f"{script}: {len(measured)} rows", flush=True)


def draw(stored: pd.DataFrame, scripts: Iterable[str]) -> None:
    """Draw the figures of scripts."""
    for script in scripts:
        rows = stored[stored["claim"].isin(claims_of(script))]
        export(import_module(script).draw(rows), IMAGES / f"{script}.png")


def claims_of(script: str) -> dict[str, dict[str, Any]]:
    """Return the words of a script's claims by name."""
    return {name: words for name, words in WORDS["claims"].items() if words["script"] == script}


def page(stored: pd.DataFrame) -> str:
    """Return docs/claims.md."""
    parts = [WORDS["begins"].strip()]
    for script, title in WORDS["scripts"].items():
        of_script = claims_of(script)
        models = " ".join(import_module(script).MODELS)
        parts += [f"## {title}", f"`python recipes/claims/{script}.py --model {models}`"]
        parts.append(
            markdown(HEADER, [cells(name, words, stored) for name, words in of_script.items()])
        )
        parts.append(f"![{title}](images/claims/{script}.png)")
    return "\n\n".join(parts) + "\n"


HEADER = ["paper", "says", "of", "prediction", "our number", "verdict"]


def cells(name: str, words: dict[str, Any], stored: pd.DataFrame) -> list[str]:
    """Return a claim's row of the page."""
    rows = stored[stored["claim"] == name]
    verdict = overall([*rows["verdict"]])
    called = CALLED.get(verdict) or f"**depends** on {words['depends']}"
    of_model = "{}, " if import_module(words["script"]).MODELS[1:] else ""
    numbers = [
        f"{of_model.format(row.model)}{escape(row.quantity)}: {number(row.value)} "
        f"[{number(row.low)}, {number(row.high)}]"
        for shown in words["numbers"]
        for row in rows[rows["quantity"].str.startswith(shown)].itertuples()
    ]
    paper = f"[{words['paper']}](https://arxiv.org/abs/{words['paper']})"
    quote = f"“{words['quote']}”" if words["quote"] else words["says"]
    noted = [called, *([words["note"]] if words["note"] else [])]
    return [
        *(paper, quote, words["scope"], words["prediction"]),
        *("<br>".join(numbers), ". ".join(noted)),
    ]


def number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0e}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """Return a table in Markdown."""
    rule = ["---"] * len(header)
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in [header, rule, *lines]
    )


def main(*arguments: str) -> None:
    scripts = [*WORDS["scripts"]] if arguments in ((), ("draw",)) else arguments
    if arguments != ("draw",):
        for script in scripts:
            store(script)
    stored = pd.read_csv(STORED, keep_default_na=False)
    draw(stored, scripts)
    PAGE.write_text(page(stored), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
