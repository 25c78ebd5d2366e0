"""Find from which alpha on each layer's scores increase in j."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse
from nope_probe.experiments.simulation.run import TheorySettings as Settings
from nope_probe.experiments.simulation.run import print_critical_alphas

EXAMPLES = (
    "",
    "--seq-len 100 --alpha 0.1 0.2",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        print_critical_alphas(parse(Settings, EXAMPLES))


if __name__ == "__main__":
    main()
