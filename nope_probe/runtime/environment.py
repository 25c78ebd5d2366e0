"""Numbers in the environment of a process."""

from __future__ import annotations

import os

from nope_probe.errors import MachineError


def number_of(name: str, default: int, low: int, above: int) -> int:
    """Return the number in an environment variable.

    Args:
        name: the variable.
        default: its value where it is not set.
        low: the lowest number that it may be.
        above: the first number above those.

    Raises:
        MachineError: for anything else.
    """
    text = os.environ.get(name, str(default))
    value = int(text) if text.isascii() and text.isdecimal() else None
    if value is None or (name in os.environ and not low <= value < above):
        raise MachineError(
            f"the environment variable {name} is {text!r}: expected a number from {low} to "
            f"{above - 1}"
        )
    return value
