"""Run one of the paper's figures, and check the paper's claims."""

from __future__ import annotations

import sys

from nope_probe.cli import one_line_errors, parse
from nope_probe.run.processes import status
from reproduce_settings import FIGURES, Settings

ALL = "every figure that a laptop can run, and a page about all sixteen"


def main() -> None:
    """Run the command line: a figure's experiments, its claims and the path of its page."""
    with one_line_errors():
        if sys.argv[1:] == ["--list"]:
            shows = {name: figure.shows for name, figure in FIGURES.items()} | {"all": ALL}
            sys.stdout.write("".join(f"{name:<9} {words}\n" for name, words in shows.items()))
            return
        settings, shown = parse(Settings, ("image", "verbose"))
        if shown["image"] is not None:
            settings.validate_drawable()
        settings.validate()
        with status("loading torch"):
            from reproduce_study import run_and_show
        run_and_show(settings, **shown)


if __name__ == "__main__":
    main()
