"""Simulate the parameter-free transformer, next to its theory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.cli import run_and_show
from nope_probe.reports.page import Report
from nope_probe.studies.commands import Command
from simulation_settings import Settings

if TYPE_CHECKING:
    from nope_probe.run.folder import Run


def report(run: Run) -> Report:
    """Return the report of a run."""
    from simulation_page import report

    return report(run)


def study() -> Callable[..., Path]:
    """Import torch, and what the command runs."""
    from simulation_study import Simulate

    return Simulate.run


main = partial(run_and_show, Command(Settings, report, study))

if __name__ == "__main__":
    main()
