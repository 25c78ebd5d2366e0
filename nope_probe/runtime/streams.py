"""The standard streams of a process, which may be closed, full, or unable to encode a text."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

STREAMS = ("stdin", "stdout", "stderr")  # by their numbers


def open_standard_streams() -> None:
    """Open closed standard streams on nothing, and let output escape what it cannot encode.

    Without this, the next file that is opened takes the number of a closed stream, and its output.
    """
    for number, name in enumerate(STREAMS):
        if getattr(sys, name) is None:
            _open_on_nothing(number)
            mode = "w" if number else "r"
            stream = io.TextIOWrapper(io.FileIO(number, mode, closefd=False), encoding="utf-8")
            setattr(sys, name, stream)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):  # in a notebook it is of another kind
            output.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Send what is left of stdout nowhere, so that the interpreter can end."""
    with suppress(OSError, ValueError):
        _open_on_nothing(sys.stdout.fileno())


def _open_on_nothing(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
