"""Compare finished runs of one command: their tables side by side, differences with intervals."""

from __future__ import annotations

from nope_probe.cli import VERBOSE, module_of, one_line_errors, parse_with
from nope_probe.studies.compare.settings import Settings

EXAMPLES = (
    "runs/ablate-nope-tiny-0a1b2c3d runs/ablate-rope-tiny-4e5f6a7b",
    "runs/one runs/two --labels before after",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, shown = parse_with(Settings, EXAMPLES, VERBOSE)
        module_of(Settings, "study").run_and_show(settings, **shown)


if __name__ == "__main__":
    main()
