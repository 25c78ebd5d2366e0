"""Compare finished runs of one command: their maps on one scale, differences with intervals."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse
from nope_probe.experiments.compare.run import Settings, run


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        folder = run(parse(Settings))
        from nope_probe.experiments.compare.summary import print_summary

        print_summary(folder)


if __name__ == "__main__":
    main()
