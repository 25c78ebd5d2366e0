"""What every command shares: settings from the command line, and one line for a user's mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

from nope_probe.errors import UserError

Settings = TypeVar("Settings")


def run_command(settings: type[Settings], action: Callable[[Settings], object]) -> None:
    """Parse the command line into settings and act on them.

    A user's mistake ends in one line on stderr and exit code 2, an interruption in 130.
    """
    chosen = tyro.cli(settings, description=settings.__doc__)
    try:
        action(chosen)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was written\n")
        sys.exit(130)
