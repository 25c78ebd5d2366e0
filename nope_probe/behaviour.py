"""Measure what a model can no longer do without mask, RoPE or weights."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse_with_image
from nope_probe.experiments.behaviour.run import Settings, run
from nope_probe.runtime.processes import is_first_process

EXAMPLES = (
    "--model nope-tiny",
    "--model rope-tiny --remove mask rope --measures loss copy",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, image = parse_with_image(Settings, EXAMPLES)
        folder = run(settings)
        if is_first_process():
            from nope_probe.experiments.behaviour.sections import report
            from nope_probe.experiments.sections import show

            show(report, folder, image)


if __name__ == "__main__":
    main()
