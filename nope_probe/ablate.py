"""Attribute the positional attention pattern to mask, RoPE and weights."""

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.ablate import Settings as Settings
from nope_probe.studies.commands import COMMANDS

main = partial(run_and_show, COMMANDS["ablate"])

if __name__ == "__main__":
    main()
