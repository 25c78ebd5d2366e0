"""Attribute the positional attention pattern to mask, RoPE and weights."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.ablate import Settings

EXAMPLES = ("--model rope-tiny", "--model llama-3.1-8b --layers 4 --seq-len 256 --data fineweb-edu")

main = partial(run_and_show, "ablate", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
