"""What holds as soon as settings are made: values that flags may have, and absolute paths.

A flag that has no effect beside the other flags is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from nope_probe.errors import UserError, validate_choices
from nope_probe.files import local_path


@dataclass(frozen=True)
class Bounds:
    """The numbers that a flag may have.

    Attributes:
        low: the lowest.
        high: the highest.
        open_above: whether `high` itself is left out.
    """

    low: int | float
    high: int | float
    open_above: bool = False

    def __contains__(self, value: int | float) -> bool:
        if self.open_above:
            return self.low <= value < self.high
        return self.low <= value <= self.high

    def describe(self, name: str) -> str:
        """Return the bounds of a number in one line.

        Example:
            >>> ALPHA.describe("alpha")
            '0 <= alpha < 1'
        """
        return f"{self.low:.12g} <= {name} {'<' if self.open_above else '<='} {self.high:.12g}"


LARGEST = 2**31 - 1  # so that products with sizes of a model fit into 64 bits
SEED = Bounds(0, 2**32 - 1)  # as NumPy takes it
COUNT = Bounds(1, LARGEST)
LAYERS = Bounds(1, 1000)
ALPHA = Bounds(0, 1, open_above=True)
# Which settings mean nothing for a source of data; another value than the default is refused.
MEANINGLESS = {
    "gaussian": ("windows", "pack", "bos", "shuffle"),
    "random": ("windows", "pack", "alpha", "shuffle"),
}


class BoundedSettings:
    """A base for dataclasses of settings, which have `Bounds` and `Literal`s in their annotations.

    Paths become absolute; in Python they may be given as text.

    Example:
        >>> from nope_probe.scores import Settings
        >>> Settings(n_seqs=0)
        Traceback (most recent call last):
        nope_probe.errors.UserError: --n-seqs 0: expected 1 <= n-seqs <= 2147483647
    """

    def __post_init__(self) -> None:
        kind: type = type(self)
        validate_choices(_hints_of(kind), vars(self))
        validate_bounds(self)
        for name in _paths_of(kind):
            object.__setattr__(self, name, _local_paths(flag_of(name), getattr(self, name)))


def validate_bounds(settings: Any) -> None:
    """Check every number of some settings against the bounds in its annotation.

    The elements of a tuple are checked one by one; None and words such as `auto` are left alone.

    Raises:
        UserError: naming the flag, the number and the bounds.
    """
    kind: type = type(settings)
    for name, bounds in _bounds_of(kind).items():
        for value in _numbers(getattr(settings, name)):
            if value not in bounds:
                flag = flag_of(name)
                raise UserError(f"{flag} {value}: expected {bounds.describe(flag.strip('-'))}")


def flag_of(name: str) -> str:
    """Return the flag of a setting.

    Example:
        >>> flag_of("n_seqs")
        '--n-seqs'
    """
    return f"--{name.replace('_', '-')}"


@cache
def _hints_of(settings: type) -> dict[str, Any]:
    hints = get_type_hints(settings, include_extras=True)
    return {each.name: hints[each.name] for each in fields(settings)}


@cache
def _bounds_of(settings: type) -> dict[str, Bounds]:
    hints, found = _hints_of(settings), {}
    for each in fields(settings):
        for note in getattr(hints[each.name], "__metadata__", ()):
            if isinstance(note, Bounds):
                found[each.name] = note
    return found


@cache
def _paths_of(settings: type) -> list[str]:
    """Return the names of the settings that are paths, or tuples of paths."""
    return [name for name, hint in _hints_of(settings).items() if _mentions_path(hint)]


def _mentions_path(hint: Any) -> bool:
    return hint is Path or any(map(_mentions_path, get_args(hint)))


def _local_paths(flag: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_local_paths(flag, each) for each in value)
    if value is not None and not isinstance(value, str | Path):
        raise UserError(f"{flag} {value!r}: expected a path")
    return None if value is None else local_path(value)


def _numbers(value: Any) -> Iterator[int | float]:
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, int | float):
            yield each


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
