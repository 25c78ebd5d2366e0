"""Find from which alpha on each layer's scores increase in j."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse
from nope_probe.run.processes import status
from simulation_settings import TheorySettings as Settings


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, _ = parse(Settings)
        with status("loading torch"):
            from simulation_study import print_critical_alphas
        print_critical_alphas(settings)


if __name__ == "__main__":
    main()
