"""Run one of the paper's figures, and check the paper's claims; or repeat a run of your own."""

from __future__ import annotations

import os
import sys

from nope_probe.cli import (
    IMAGE,
    VERBOSE,
    beside,
    one_line_errors,
    parse,
    parse_with,
    typed_arguments,
)
from nope_probe.experiments.paper.settings import FIGURES, RepeatSettings, Settings

EXAMPLES = (
    "figure2",
    "figure5 --model rope-tiny --seq-len 64 --data shipped",
)
RUN_EXAMPLES = (
    "runs/ablate-rope-tiny-8d5ee2a4",
    "runs/ablate-rope-tiny-8d5ee2a4 --methods",
)


def main() -> None:
    """Run the command line; exit with code 1 if a repeated run did not come out the same."""
    with one_line_errors():
        if is_path(typed_arguments()):
            repeat()
        else:
            reproduce_figure()


def is_path(arguments: list[str]) -> bool:
    """Return whether the first argument is a run's folder, or a file, and no figure's name."""
    first = next(iter(arguments), "-")
    if first.startswith("-") or first in (*FIGURES, "all"):
        return False
    return os.sep in first or os.path.exists(first)


def repeat() -> None:
    """Repeat a run from its manifest and print whether it came out the same, or describe it."""
    settings = parse(RepeatSettings, RUN_EXAMPLES)
    if not beside(Settings, "run").repeat_and_show(settings):
        sys.exit(1)


def reproduce_figure() -> None:
    """Run a figure's experiments, and print its claims and the path of its page."""
    settings, shown = parse_with(Settings, EXAMPLES, IMAGE, VERBOSE)
    if shown["image"] is not None:
        settings.validate_drawable()
    settings.validate()
    beside(Settings, "run").run_and_show(settings, **shown)


if __name__ == "__main__":
    main()
