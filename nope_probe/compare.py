"""Compare finished runs of one command: their maps on one scale, differences with intervals."""

from __future__ import annotations

from functools import partial

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
        folder, members = run(settings), settings.members
        from nope_probe.experiments.compare.analyse import compare_maps
        from nope_probe.experiments.compare.sections import report
        from nope_probe.experiments.sections import show

        maps = [] if image is None else compare_maps(members)
        show(partial(report, folder=folder, members=members, maps=maps), folder, image)


if __name__ == "__main__":
    main()
