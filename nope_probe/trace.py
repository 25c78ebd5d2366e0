"""Trace who writes the position that each layer reads, without removing anything."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.trace import Settings

EXAMPLES = ("--model nope-tiny", "--model rope-tiny --reader L1H2 --confirm 0")

main = partial(run_and_show, "trace", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
