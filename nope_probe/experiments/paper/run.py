"""The `reproduce` command's run: one figure, or all that a laptop can."""

from __future__ import annotations

from pathlib import Path

from nope_probe.experiments.paper.figure import run_figure
from nope_probe.experiments.paper.index import run_all
from nope_probe.experiments.paper.settings import Settings


def run(settings: Settings) -> Path:
    """Reproduce what is asked for unless that is finished, and return the folder with its page.

    Raises:
        UserError: for what cannot be done.
    """
    settings.validate()
    return run_all(settings) if settings.figure == "all" else run_figure(settings)
