"""The umbrella command: `nope-probe COMMAND` or `python -m nope_probe COMMAND`."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, run_subcommand


def main() -> None:
    """Run the command that the first argument names."""
    with one_line_errors():
        run_subcommand()


if __name__ == "__main__":
    main()
