"""Compare finished runs of one command: every number that they share, with intervals and tests."""

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.commands import COMMANDS
from nope_probe.studies.compare import Settings as Settings

main = partial(run_and_show, COMMANDS["compare"])

if __name__ == "__main__":
    main()
