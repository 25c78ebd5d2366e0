"""The command line: settings parsed by tyro, and errors in one line on stderr."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import tyro

from nope_probe.errors import UserError

Settings = TypeVar("Settings")


def parse(settings: type[Settings]) -> Settings:
    """Return the settings on the command line; the class's docstring is the help."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name}" if module else None
    return tyro.cli(settings, prog=program, description=inspect.cleandoc(settings.__doc__ or ""))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on stderr after a user's mistake or an interruption.

    A mistake has exit code 2, an interruption 130 (SIGINT) or 143 (SIGTERM). Of several processes
    on one machine, the first prints the line.
    """
    try:
        yield
    except UserError as error:
        _end(f"error: {error}", 2)
    except KeyboardInterrupt as error:
        _end(
            f"interrupted: {str(error) or 'nothing was written'}",
            128 + getattr(error, "signum", signal.SIGINT),
        )


def _end(message: str, code: int) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{message}\n")
    sys.exit(code)
