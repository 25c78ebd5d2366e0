"""The `reproduce` command's run: one figure, or all that a laptop can."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from nope_probe.errors import UserError
from nope_probe.experiments.paper.analyse import analyse
from nope_probe.experiments.paper.sections import COLUMNS, SHOWS, entry_of, index_page, rows_of
from nope_probe.experiments.paper.settings import (
    NAMES,
    SCORES,
    SIMULATED,
    Experiment,
    FigureName,
    Settings,
    experiments_of,
)
from nope_probe.reports.page import Link
from nope_probe.runtime.folder import atomic_write, check_output_dir, default_output_dir, write_run
from nope_probe.runtime.places import output_folder, validate_folder_place
from nope_probe.runtime.processes import (
    is_first_process,
    own_device,
    process_group,
    validate_one_process,
)

FILES = {"report.html", "figures.csv"}


def run(settings: Settings) -> Path:
    """Reproduce what is asked for unless that is finished, and return the folder with its page.

    Raises:
        UserError: for what cannot be done.
    """
    if settings.figure == "all":
        return run_all(settings)
    return run_figure(settings)


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


def run_all(settings: Settings) -> Path:
    """Run all figures that a laptop can, write one page about all sixteen, and return its folder.

    The page is written anew each time, from the finished runs beside its folder.

    Raises:
        UserError: if the folder holds something else.
    """
    settings.validate()
    validate_one_process()
    folder = output_folder(settings.out or Path("runs") / "reproduce-all")
    _validate_folder(folder)
    ours = {}
    for figure in (name for name in NAMES if name not in SCORES):
        sys.stderr.write(f"{figure}: {SHOWS[figure]}\n")
        ours[figure] = run_figure(_settings_of(figure, settings, folder.parent))
    entries = [entry_of(figure, ours.get(figure), folder.parent) for figure in NAMES]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for entry in entries for row in rows_of(entry, folder)]
    with atomic_write(folder / "figures.csv") as path:
        text_rows = [
            [each.href if isinstance(each, Link) else each for each in row] for row in rows
        ]
        pd.DataFrame(text_rows, columns=list(COLUMNS)).to_csv(path, index=False)
    with atomic_write(folder / "report.html") as path:
        path.write_text(index_page(entries, rows), encoding="utf-8")
    return folder


def _validate_folder(folder: Path) -> None:
    if folder.is_file():
        raise UserError(f"cannot write to {folder}: it is a file")
    if folder.is_dir() and not {each.name for each in folder.iterdir()} <= FILES:
        raise UserError(f"{folder} holds other files; choose another --out")
    validate_folder_place(folder)


def _settings_of(figure: FigureName, settings: Settings, beside: Path) -> Settings:
    """Return the settings of one figure among all, whose folder is in `beside`."""
    chosen = Settings(figure=figure)
    if figure in SIMULATED:
        chosen = replace(chosen, n_samples=settings.n_samples)
    if figure != "figure1":
        chosen = replace(chosen, seed=settings.seed)
    recorded = recorded_settings(figure, experiments_of(chosen))
    return replace(chosen, out=beside / default_output_dir("reproduce", figure, recorded).name)
