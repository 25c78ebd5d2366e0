"""Simulate the parameter-free transformer, beside its theory."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse_with_image
from nope_probe.experiments.simulation.run import Settings, run

EXAMPLES = (
    "--alpha 0 0.2",
    "--rope --n-layers 3 --target-se 1e-4",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, image = parse_with_image(Settings, EXAMPLES)
        folder = run(settings)
        from nope_probe.experiments.sections import show
        from nope_probe.experiments.simulation.sections import report

        show(report, folder, image)


if __name__ == "__main__":
    main()
