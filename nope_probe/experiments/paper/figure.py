"""One figure of the paper: its experiments, its claims, and its published panels."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.experiments.paper.agreement import (
    Agreement,
    agreement_table,
    agreements,
    verdict,
)
from nope_probe.experiments.paper.checks import claims_of, notes_of
from nope_probe.experiments.paper.claim import Claim
from nope_probe.experiments.paper.page import figure_page
from nope_probe.experiments.paper.pairs import Pair, pairs_of
from nope_probe.experiments.paper.settings import (
    Experiment,
    Settings,
    experiments_of,
    papers_name,
)
from nope_probe.runtime.folder import Run, check_output_dir, default_output_dir, read_run, write_run
from nope_probe.runtime.places import output_folder
from nope_probe.runtime.processes import is_first_process, own_device, process_group
from nope_probe.runtime.provenance import command_line, versions


def run_figure(settings: Settings) -> Path:
    """Reproduce a figure unless that is finished, and return its folder.

    Raises:
        UserError: for what cannot be done, and for a finished figure whose experiments' files,
            model or data have changed.
    """
    settings.validate()
    started, experiments = time.monotonic(), experiments_of(settings)
    recorded = recorded_settings(settings.figure, experiments)
    default = default_output_dir("reproduce", settings.figure, recorded)
    folder = default if settings.out is None else output_folder(settings.out)
    if check_output_dir(folder, recorded):
        kept = [each for each in experiments if each.folder(folder.parent).is_dir()]
        run_experiments(kept, folder.parent)  # finished: only checked
    else:
        folders = run_experiments(experiments, folder.parent)
        if is_first_process():
            write_run(folder, analyse(settings, recorded, folders, folder, started))
    return folder


def recorded_settings(figure: str, experiments: list[Experiment]) -> dict[str, Any]:
    """Return the settings that identify a figure's run: those of its experiments."""
    return {
        "figure": figure,
        "experiments": {each.name: each.settings.recorded() for each in experiments},
    }


def run_experiments(experiments: list[Experiment], beside: Path) -> dict[str, Path]:
    """Run a figure's experiments unless they are finished, and return their folders by name."""
    for each in experiments:
        each.settings.validate()
    with ExitStack() as stack:
        if any(each.command == "scores" for each in experiments):
            # One group for all models: it cannot be joined again.
            stack.enter_context(process_group(own_device("auto")))
        return {each.name: each.run(beside) for each in experiments}


def analyse(
    settings: Settings,
    recorded: dict[str, Any],
    folders: Mapping[str, Path],
    folder: Path,
    started: float,
) -> Run:
    """Check the claims, compare the published panels, and return the run."""
    figure = settings.figure
    claims = claims_of(figure, folders)
    pairs = pairs_of(figure, {name: read_run(each) for name, each in folders.items()})
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


def is_as_the_paper(settings: Settings) -> bool:
    """Return whether a figure was run on the paper's models and with its settings."""
    papers = Settings(figure=settings.figure)
    if not settings.models:
        return True
    same = all(papers_name(settings.figure, model) for model in settings.models)
    given = ("n_seqs", "seq_len", "data", "windows", "layers")
    return same and all(getattr(settings, name) == getattr(papers, name) for name in given)


def _relative(folder: Path, start: Path) -> str:
    return Path(os.path.relpath(folder, start)).as_posix()


def verdicts(claims: list[tuple[str, Claim]]) -> list[str]:
    """Return how many claims of the paper are reproduced, and which are not, in sentences."""
    failed = [one.paper for _, one in claims if not one.reproduced]
    held = len(claims) - len(failed)
    sentences = [f"Reproduced: {held} of {len(claims)} claims of the paper."] if claims else []
    return sentences + ([f"Not reproduced: {'; '.join(failed)}."] if failed else [])
