"""Find from which alpha on each layer of the parameter-free transformer increases in j."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse
from nope_probe.experiments.simulation.theory import Settings, print_critical_alphas


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        print_critical_alphas(parse(Settings))


if __name__ == "__main__":
    main()
