"""Find out what the heads at the top of an order do: remove RoPE, content or mask from them."""

from functools import partial

from nope_probe.cli import run_and_show
from nope_probe.studies.commands import COMMANDS
from nope_probe.studies.heads import Settings as Settings

main = partial(run_and_show, COMMANDS["heads"])

if __name__ == "__main__":
    main()
