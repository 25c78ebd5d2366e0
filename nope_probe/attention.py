"""Split each head's attention into position, the same in every text, and content."""

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.attention import Settings as Settings
from nope_probe.studies.commands import COMMANDS

main = partial(run_and_show, COMMANDS["attention"])

if __name__ == "__main__":
    main()
