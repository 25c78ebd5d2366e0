"""From a figure's finished experiments to its run: claims, panels, notes and page."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.experiments.paper.claims import Claim, claims_of
from nope_probe.experiments.paper.panels import agreements, pairs_of, verdict
from nope_probe.experiments.paper.sections import report
from nope_probe.experiments.paper.settings import FIGURES, Settings
from nope_probe.runtime.folder import Run, read_run
from nope_probe.runtime.identity import command_line, versions
from nope_probe.runtime.session import Session

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


def analyse(session: Session[Settings], folders: Mapping[str, Path]) -> Run:
    """Check the claims, compare the published panels, and return the run.

    Args:
        session: the figure's run.
        folders: its finished experiments by name.
    """
    settings, figure = session.settings, session.settings.figure
    runs = {name: read_run(folder) for name, folder in folders.items()}
    claims, pairs = claims_of(figure, runs), pairs_of(figure, runs)
    agreement = agreements(pairs)
    sentence = "" if agreement.empty else verdict(agreement)
    manifest: dict[str, Any] = {
        "command": command_line(),
        "kind": "reproduce",
        "settings": session.recorded,
        "sources": session.sources,
        "as_the_paper": settings.is_as_the_paper,
        "experiments": {
            name: Path(os.path.relpath(folder, session.folder)).as_posix()
            for name, folder in folders.items()
        },
        "claims": [asdict(claim) for claim in claims],
        "panels": {
            "published": len(pairs),
            "compared": len(agreement),
            "exact": int((agreement["within_one"] == 1).sum()),
            "agree": int(agreement["agrees"].sum()),
            "verdict": sentence,
        },
        "headline": [*verdicts(claims), *filter(None, [sentence])],
        "notes": notes_of(settings),
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - session.started, 3),
    }
    steps = {pair.published.key: pair.steps for pair in pairs}
    differences = {key: step.astype(np.float32) for key, step in steps.items() if step is not None}
    run = Run(
        manifest=manifest,
        arrays={"maps": differences},
        tables={"claims": pd.DataFrame(manifest["claims"]), "panels": agreement},
    )
    return replace(run, page=report(run, pairs).html(manifest))


def notes_of(settings: Settings) -> list[str]:
    """Return sentences on the differences between a figure's run and the paper's."""
    figure, notes = FIGURES[settings.figure], []
    if figure.is_of_nope and not settings.is_as_the_paper:
        notes.append(NOPE_NOTE.format(model=settings.models[0]))
    elif figure.maps and not settings.is_as_the_paper:
        notes.append(SCORES_NOTE)
    if len(figure.maps) == 1:  # the appendix
        notes.append(TRUE_MEANS)
    return notes


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """Return sentences on the number of reproduced claims, and on the claims that failed."""
    failed = [claim.paper for claim in claims if not claim.reproduced]
    held = len(claims) - len(failed)
    sentences = [f"Reproduced: {held} of {len(claims)} claims of the paper."] if claims else []
    return sentences + ([f"Not reproduced: {'; '.join(failed)}."] if failed else [])
