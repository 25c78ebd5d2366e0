"""From a figure's finished experiments to its claims, its panels and its page."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.experiments.paper import simulated
from nope_probe.experiments.paper.claims import Claim, trained_claims
from nope_probe.experiments.paper.panels import (
    Agreement,
    Pair,
    agreement_table,
    agreements,
    pairs_of,
    verdict,
)
from nope_probe.experiments.paper.sections import figure_page
from nope_probe.experiments.paper.settings import (
    NOPE_FIGURES,
    SIMULATED,
    Settings,
    is_as_the_paper,
)
from nope_probe.runtime.folder import Run, read_run
from nope_probe.runtime.identity import command_line, versions

NOPE_NOTE = (
    "run on {model}; the paper used its own 1.5B model (nope-1.5b), and the first 50 tokens of "
    "documents of fineweb-edu."
)
SCORES_NOTE = (
    "the paper used llama-3.1-8b, phi-4 and qwen3-8b, and the first 1,024 tokens of 1,000 "
    "documents of fineweb-edu."
)
TRUE_MEANS = (
    "the published Figures 11 to 16 are 50 times too small in scale (20 sequences, divided by 50); "
    "these maps are true means."
)


def claims_of(figure: str, runs: Mapping[str, Run]) -> list[tuple[str, Claim]]:
    """Return the paper's claims about a figure, checked, each with its experiment's name.

    Args:
        figure: the figure.
        runs: its finished experiments by name.
    """
    if figure == "figure1" or figure in SIMULATED:
        evidence = [simulated.evidence_of(run) for run in runs.values()]
        name = next(iter(runs), "")  # a claim about two halves links to the first
        return [(name, claim) for claim in getattr(simulated, figure)(*evidence)]
    return [(name, claim) for name, run in runs.items() for claim in trained_claims(figure, run)]


def notes_of(figure: str, models: tuple[str, ...], as_the_paper: bool) -> list[str]:
    """Return in what a figure's run differs from the paper's, a sentence each.

    Args:
        figure: the figure.
        models: the models it was run on; none for a simulated figure.
        as_the_paper: whether these models and their settings are the paper's.
    """
    notes = []
    if figure in NOPE_FIGURES and not as_the_paper:
        notes.append(NOPE_NOTE.format(model=models[0]))
    elif models and not as_the_paper:
        notes.append(SCORES_NOTE)
    if figure.removeprefix("figure") in ("11", "12", "13", "14", "15", "16"):
        notes.append(TRUE_MEANS)
    return notes


def analyse(
    settings: Settings,
    recorded: dict[str, Any],
    folders: Mapping[str, Path],
    folder: Path,
    started: float,
) -> Run:
    """Check the claims, compare the published panels, and return the run."""
    figure = settings.figure
    runs = {name: read_run(each) for name, each in folders.items()}
    claims, pairs = claims_of(figure, runs), pairs_of(figure, runs)
    found = agreements(pairs)
    as_the_paper = is_as_the_paper(settings)
    headline = verdicts(claims)
    if found:
        headline.append(verdict(found))
    manifest: dict[str, Any] = {
        "command": command_line(),
        "kind": "reproduce",
        "settings": recorded,
        "as_the_paper": as_the_paper,
        "experiments": {name: _relative(each, folder) for name, each in folders.items()},
        "claims": [{"experiment": name, **asdict(claim)} for name, claim in claims],
        "panels": _panels_record(pairs, found),
        "headline": headline,
        "notes": notes_of(figure, settings.models, as_the_paper),
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 3),
    }
    links = {name: f"{each}/report.html" for name, each in manifest["experiments"].items()}
    return Run(
        manifest=manifest,
        arrays={"maps": _differences(pairs)},
        tables={"claims": pd.DataFrame(manifest["claims"]), "panels": agreement_table(found)},
        page=figure_page(figure, claims, pairs, links, manifest),
    )


def _panels_record(pairs: Sequence[Pair], found: Sequence[Agreement]) -> dict[str, Any]:
    """Return how many of a figure's published panels were compared, and how many agree."""
    return {
        "published": len(pairs),
        "compared": len(found),
        "exact": sum(each.within_one == 1 for each in found),
        "agree": sum(each.agrees for each in found),
        "verdict": verdict(found) if found else "",
    }


def _differences(pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
    """Return the differences in colour steps by the name of the published panel."""
    steps = {pair.published.key: pair.steps for pair in pairs}
    return {key: each.astype(np.float32) for key, each in steps.items() if each is not None}


def _relative(folder: Path, start: Path) -> str:
    return Path(os.path.relpath(folder, start)).as_posix()


def verdicts(claims: list[tuple[str, Claim]]) -> list[str]:
    """Return how many claims of the paper are reproduced, and which are not, in sentences."""
    failed = [one.paper for _, one in claims if not one.reproduced]
    held = len(claims) - len(failed)
    sentences = [f"Reproduced: {held} of {len(claims)} claims of the paper."] if claims else []
    return sentences + ([f"Not reproduced: {'; '.join(failed)}."] if failed else [])
