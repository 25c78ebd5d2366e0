"""Follow one block, stage by stage, to the next block's scores."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse
from nope_probe.experiments.circuit.run import Settings, run
from nope_probe.runtime.folder import read_run

EXAMPLES = (
    "--model nope-tiny",
    "--model rope-tiny --layer 1 --remove mask w_q",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings = parse(Settings, EXAMPLES)
        folder = run(settings)
        from nope_probe.experiments.circuit.summary import print_summary

        print_summary(read_run(folder), folder)
        if settings.image is not None:
            from nope_probe.experiments.circuit.page import export_image

            export_image(read_run(folder), settings.image)


if __name__ == "__main__":
    main()
