"""Compare finished runs of one command: their maps on one scale, differences with intervals."""

from __future__ import annotations

from nope_probe.cli import one_line_errors, parse_with_image
from nope_probe.experiments.compare.run import Settings, run

EXAMPLES = (
    "runs/ablate-nope-tiny-0a1b2c3d runs/ablate-rope-tiny-4e5f6a7b",
    "runs/one runs/two --labels before after",
)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        settings, image = parse_with_image(Settings, EXAMPLES)
        folder = run(settings)
        from nope_probe.experiments.compare.summary import print_summary

        print_summary(folder)
        if image is not None:
            from nope_probe.experiments.image import draw_image

            draw_image(folder, image)


if __name__ == "__main__":
    main()
