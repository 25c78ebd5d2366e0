"""What every command shares: settings from the command line, and one line for a user's mistake."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

from nope_probe.errors import UserError

Settings = TypeVar("Settings")


def run_command(settings: type[Settings], action: Callable[[Settings], object]) -> None:
    """Parse the command line into settings and act on them.

    A user's mistake ends in one line on stderr and exit code 2, an interruption in 130 (SIGINT) or
    143 (SIGTERM). Of several processes on one machine, one says it.
    """
    chosen = tyro.cli(settings, description=settings.__doc__)
    try:
        action(chosen)
    except UserError as error:
        _end(f"error: {error}", 2)
    except KeyboardInterrupt as error:
        _end(
            f"interrupted: {str(error) or 'nothing was written'}",
            128 + getattr(error, "signum", signal.SIGINT),
        )


def is_first_process() -> bool:
    """Tell whether this process is alone, or the first of those that share a run."""
    return os.environ.get("RANK", "0") == "0"


def process_count() -> int:
    """Tell how many processes torchrun started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_processes() -> None:
    """Refuse to do in several processes what one has to do.

    Raises:
        UserError: if this process is one of several.
    """
    if process_count() > 1:
        raise UserError(
            "only ablate, scores and the figures of language models run in several processes"
        )


def _end(message: str, code: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{message}\n")
    sys.exit(code)
