"""Trace who writes the position that each layer reads, without removing anything."""

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.commands import COMMANDS
from nope_probe.studies.trace import Settings as Settings

main = partial(run_and_show, COMMANDS["trace"])

if __name__ == "__main__":
    main()
