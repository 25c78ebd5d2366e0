"""Run one of the paper's figures, and check the paper's claims about it."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse_with_image
from nope_probe.experiments.paper.settings import Settings
from nope_probe.runtime.distributed import is_first_process

EXAMPLES = (
    "figure2",
    "figure5 --model rope-tiny --seq-len 64 --data shipped",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, image = parse_with_image(Settings, EXAMPLES)
        if image is not None:
            settings.validate_drawable()
        from nope_probe.experiments.paper.run import run

        folder = run(settings)
        if is_first_process():
            from nope_probe.experiments.paper.summary import print_index, print_summary

            (print_index if settings.figure == "all" else print_summary)(folder)
            if image is not None:
                from nope_probe.experiments.image import draw_image

                draw_image(folder, image)


if __name__ == "__main__":
    main()
