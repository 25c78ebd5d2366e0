"""Run one of the paper's figures, and check the paper's claims; or repeat a run of your own."""

from __future__ import annotations

import os
import sys

from nope_probe.cli import one_line_errors, parse, parse_with_image, typed_arguments
from nope_probe.experiments.paper.run import run
from nope_probe.experiments.paper.settings import FIGURES, Settings
from nope_probe.runtime.processes import is_first_process

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
    from nope_probe.experiments import repeat
    from nope_probe.experiments.sections import print_lines

    settings = parse(repeat.Settings, RUN_EXAMPLES)
    if settings.methods:
        print_lines([repeat.methods_of(settings)])
        return
    comparison = repeat.run(settings)
    print_lines([str(comparison)])
    if not comparison.same:
        sys.exit(1)


def reproduce_figure() -> None:
    """Run a figure's experiments, and print its claims and the path of its page."""
    settings, image = parse_with_image(Settings, EXAMPLES)
    if image is not None:
        settings.validate_drawable()
    folder = run(settings)
    if is_first_process():
        from nope_probe.experiments.paper.analyse import print_index
        from nope_probe.experiments.paper.sections import draw, print_summary

        (print_index if settings.figure == "all" else print_summary)(folder)
        if image is not None:
            draw(folder, image)


if __name__ == "__main__":
    main()
