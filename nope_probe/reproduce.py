"""Run one of the paper's figures, and check the paper's claims."""

from __future__ import annotations

from nope_probe.cli import IMAGE, VERBOSE, module_of, one_line_errors, parse_with
from nope_probe.studies.paper.settings import Settings

EXAMPLES = ("figure2", "figure5 --model rope-tiny --seq-len 64 --data shipped")


def main() -> None:
    """Run the command line: a figure's experiments, its claims and the path of its page."""
    with one_line_errors():
        settings, shown = parse_with(Settings, EXAMPLES, IMAGE, VERBOSE)
        if shown["image"] is not None:
            settings.validate_drawable()
        settings.validate()
        module_of(Settings, "study").run_and_show(settings, **shown)


if __name__ == "__main__":
    main()
