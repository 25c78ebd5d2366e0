"""The `reproduce` command's run: a figure of the paper, or all figures that a laptop can run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nope_probe.errors import UserError
from nope_probe.run.processes import is_first_process, output_folder, validate_folder_place
from nope_probe.run.session import Session
from nope_probe.studies.ablate import Settings as AblateSettings
from nope_probe.studies.ablate_run import Ablate
from nope_probe.studies.circuit import Settings as CircuitSettings
from nope_probe.studies.circuit_run import CaptureStages
from nope_probe.studies.study import Study
from reproduce_analysis import analyse, print_index, write_index
from reproduce_page import draw, print_summary
from reproduce_settings import (
    FIGURES,
    ExperimentSettings,
    Settings,
    experiments_of,
    place,
)
from simulation_settings import Settings as Simulation
from simulation_study import Simulate

STUDIES: Mapping[type[ExperimentSettings], type[Study[Any]]] = {
    Simulation: Simulate,
    CircuitSettings: CaptureStages,
    AblateSettings: Ablate,
}
INDEX_FILES = {"report.html", "figures.csv"}


def run(settings: Settings) -> Path:
    """Reproduce a figure, or all, unless finished, and return the folder with the page.

    Raises:
        UserError: for settings that cannot be run.
    """
    return run_all(settings) if settings.figure == "all" else run_figure(settings)


def run_and_show(settings: Settings, image: Path | None, verbose: bool) -> None:
    """Reproduce a figure, or all; print the claims, and draw the maps into an image file."""
    folder = run(settings)
    if is_first_process():
        (print_index if settings.figure == "all" else print_summary)(folder, verbose)
        if image is not None:
            draw(folder, image)


def run_figure(settings: Settings) -> Path:
    """Reproduce a figure unless it is finished, and return its folder.

    Raises:
        UserError: for settings that cannot be run, and for a finished figure whose experiments'
            files, model or data have changed.
    """
    with Session(settings).opened() as session:
        above, finished = session.folder.parent, session.finished
        folders = run_experiments(experiments_of(settings), above, finished=finished)
        if not finished and session.processes.is_first:
            session.write(analyse(session, folders))
    return session.folder


def run_all(settings: Settings) -> Path:
    """Run all figures that a laptop can run, write a page about all sixteen, return its folder.

    The page is always written anew, from the finished runs next to its folder.

    Raises:
        UserError: if the folder holds other files.
    """
    settings.validate()
    folder = output_folder(settings.out or Path("runs") / "reproduce-all")
    if folder.is_dir() and not {path.name for path in folder.iterdir()} <= INDEX_FILES:
        raise UserError(f"{folder} holds other files; choose another --out")
    validate_folder_place(folder)
    new = {}
    for name, figure in FIGURES.items():
        if not figure.maps:
            sys.stderr.write(f"{name}: {figure.shows}\n")
            given = {flag: getattr(settings, flag) for flag in ("seed", "n_samples")}
            known = {flag: value for flag, value in given.items() if flag in figure.flags}
            chosen = Settings(figure=name, **known)
            new[name] = run_figure(replace(chosen, out=place(chosen, folder.parent)))
    write_index(folder, new)
    return folder


def run_experiments(
    experiments: Mapping[str, ExperimentSettings], above: Path, *, finished: bool
) -> dict[str, Path]:
    """Run experiments unless they are finished, and return their folders, in `above`, by name.

    Args:
        experiments: the settings by name.
        above: the folder that holds the runs' folders.
        finished: whether all experiments ran before; removed folders are then left out.
    """
    folders = {}
    for name, settings in experiments.items():
        study = STUDIES[type(settings)]
        folder = place(settings, above)
        if folder.is_dir() or not finished:
            folders[name] = study.run(replace(settings, out=folder))
    return folders
