"""Follow one block, stage by stage, to the next block's scores."""

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.circuit import Settings as Settings
from nope_probe.studies.commands import COMMANDS

main = partial(run_and_show, COMMANDS["circuit"])

if __name__ == "__main__":
    main()
