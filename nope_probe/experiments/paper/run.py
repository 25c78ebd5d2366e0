"""The `reproduce` command's run: a figure of the paper, or all figures that a laptop can run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from nope_probe.errors import UserError
from nope_probe.experiments.paper.settings import (
    FIGURES,
    Settings,
    experiments_of,
    place,
    run_experiments,
)
from nope_probe.runtime.folder import output_folder, validate_folder_place
from nope_probe.runtime.session import Session

INDEX_FILES = {"report.html", "figures.csv"}


def run(settings: Settings) -> Path:
    """Reproduce a figure, or all, unless finished, and return the folder with the page.

    Raises:
        UserError: for settings that cannot be run.
    """
    return run_all(settings) if settings.figure == "all" else run_figure(settings)


def run_figure(settings: Settings) -> Path:
    """Reproduce a figure unless it is finished, and return its folder.

    Raises:
        UserError: for settings that cannot be run, and for a finished figure whose experiments'
            files, model or data have changed.
    """
    with Session("reproduce", settings) as session:
        beside, finished = session.folder.parent, session.finished
        folders = run_experiments(experiments_of(settings), beside, finished=finished)
        if not finished and session.is_first:
            from nope_probe.experiments.paper.analyse import analyse

            session.write(analyse(session, folders))
    return session.folder


def run_all(settings: Settings) -> Path:
    """Run all figures that a laptop can run, write a page about all sixteen, return its folder.

    The page is always written anew, from the finished runs beside its folder.

    Raises:
        UserError: if the folder holds other files.
    """
    settings.validate()
    folder = output_folder(settings.out or Path("runs") / "reproduce-all")
    if folder.is_dir() and not {path.name for path in folder.iterdir()} <= INDEX_FILES:
        raise UserError(f"{folder} holds other files; choose another --out")
    validate_folder_place(folder)
    own = {}
    for name, figure in FIGURES.items():
        if not figure.maps:
            sys.stderr.write(f"{name}: {figure.shows}\n")
            given = {flag: getattr(settings, flag) for flag in ("seed", "n_samples")}
            known = {flag: value for flag, value in given.items() if flag in figure.flags}
            chosen = Settings(figure=name, **known)
            own[name] = run_figure(replace(chosen, out=place("reproduce", chosen, folder.parent)))
    from nope_probe.experiments.paper.analyse import write_index

    write_index(folder, own)
    return folder
