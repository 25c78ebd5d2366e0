"""Follow one block, stage by stage, to the next block's scores."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse
from nope_probe.experiments.circuit.run import Settings, run

EXAMPLES = (
    "--model nope-tiny",
    "--model rope-tiny --layer 1 --remove mask w_q",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings = parse(Settings, EXAMPLES)
        folder = run(settings)
        from nope_probe.experiments.circuit.sections import report
        from nope_probe.experiments.sections import show

        show(report, folder, settings.image)


if __name__ == "__main__":
    main()
