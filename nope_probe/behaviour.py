"""Measure what a model can no longer do without mask, RoPE or weights."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.behaviour import Settings

EXAMPLES = ("--model nope-tiny", "--model rope-tiny --remove mask rope --measures loss copy")

main = partial(run_and_show, "behaviour", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
