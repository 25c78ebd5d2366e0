"""Find from which alpha on each layer's scores increase in j."""

from __future__ import annotations

from nope_probe.cli import module_of, one_line_errors, parse
from simulation_settings import TheorySettings as Settings

EXAMPLES = ("", "--seq-len 100 --alpha 0.1 0.2")


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings = parse(Settings, EXAMPLES)
        module_of(Settings, "study").print_critical_alphas(settings)


if __name__ == "__main__":
    main()
