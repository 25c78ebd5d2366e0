"""Follow one block, stage by stage, to the next block's scores."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.circuit import Settings

EXAMPLES = ("--model nope-tiny", "--model rope-tiny --layer 1 --remove mask w_q")

main = partial(run_and_show, "circuit", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
