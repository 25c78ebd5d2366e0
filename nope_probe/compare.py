"""Compare finished runs of one command: every number that they share, with intervals and tests."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import VERBOSE, run_and_show
from nope_probe.studies.compare import Settings

EXAMPLES = (
    "runs/ablate-nope-tiny-0a1b2c3d runs/ablate-rope-tiny-4e5f6a7b",
    "runs/one runs/two --labels before after",
)

main = partial(run_and_show, "compare", Settings, EXAMPLES, (VERBOSE,))

if __name__ == "__main__":
    main()
