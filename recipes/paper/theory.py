"""Find from which alpha on each layer's scores increase in j."""

from __future__ import annotations

from nope_probe.cli import module_of, one_line_errors, parse
from simulation_settings import TheorySettings as Settings


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, _ = parse(Settings)
        module_of(Settings, "study").print_critical_alphas(settings)


if __name__ == "__main__":
    main()
