"""Measure what a model can no longer do without mask, RoPE or weights."""

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.behaviour import Settings as Settings
from nope_probe.studies.commands import COMMANDS

main = partial(run_and_show, COMMANDS["behaviour"])

if __name__ == "__main__":
    main()
