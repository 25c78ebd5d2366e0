"""Simulate the parameter-free transformer, next to its theory."""

from __future__ import annotations

from functools import partial

from nope_probe.cli import run_and_show
from simulation_settings import Settings

EXAMPLES = ("--alpha 0 0.2", "--rope --n-layers 3 --target-se 1e-4")

main = partial(run_and_show, "simulate", Settings, EXAMPLES)

if __name__ == "__main__":
    main()
