"""A flag that has no effect beside the other flags is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nope_probe.errors import UserError
from nope_probe.runtime.bounds import flag_of

# Which settings mean nothing for a source of data; another value than the default is refused.
MEANINGLESS = {
    "gaussian": ("windows", "pack", "bos", "shuffle"),
    "random": ("windows", "pack", "alpha", "shuffle"),
}


def validate_effects(settings: Any, without_effect: Mapping[str, str]) -> None:
    """Check that no flag without an effect was given another value than its default.

    Args:
        settings: a dataclass.
        without_effect: by setting, why it has none, as in `no effect on --data random`.

    Raises:
        UserError: naming the flag, and why it has no effect.
    """
    for each in fields(settings):
        if each.name in without_effect and getattr(settings, each.name) != each.default:
            raise UserError(f"{flag_of(each.name)} has no effect {without_effect[each.name]}")
