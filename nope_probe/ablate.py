"""Attribute the positional attention pattern to mask, RoPE and weights."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse_with_image
from nope_probe.experiments.ablation.run import Settings, run
from nope_probe.runtime.processes import is_first_process

EXAMPLES = (
    "--model rope-tiny",
    "--model llama-3.1-8b --layers 4 --seq-len 256 --data fineweb-edu",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, image = parse_with_image(Settings, EXAMPLES)
        folder = run(settings)
        if is_first_process():
            from nope_probe.experiments.ablation.sections import report
            from nope_probe.experiments.sections import show

            show(report, folder, image)


if __name__ == "__main__":
    main()
