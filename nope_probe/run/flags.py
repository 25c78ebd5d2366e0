"""Flags: their bounds, their help, and the checks of all settings.

Numbers are within bounds, words are choices, paths are absolute, and a flag that has no effect
next to the other flags is refused, never ignored. A flag's help is in the docstring of its class.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from inspect import Parameter, cleandoc
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from nope_probe.errors import UserError, as_tuple, leaves_of, validate_choices, validate_types
from nope_probe.files import JsonObject, local_path

Chosen = TypeVar("Chosen", bound="BoundedSettings")
HELP = "\n\nAttributes:\n"
_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.M)  # a name and its help, with its lines


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

    def validate(self, flag: str, values: tuple[Any, ...]) -> None:
        """Check the numbers among a flag's values; None and words such as `auto` are left alone."""
        for value in values:
            if isinstance(value, int | float) and value not in self:
                raise UserError(f"{flag} {value}: expected {self.describe(flag.strip('-'))}")

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
SEQ_LEN = Bounds(4, LARGEST)
ALPHA = Bounds(0, 1, open_above=True)


class BoundedSettings:
    """A base for dataclasses of settings, which have `Bounds` and `Literal`s in their annotations.

    Paths become absolute; in Python they may be given as text. Values from Python are checked
    against their types too.

    Example:
        >>> from nope_probe.ablate import Settings
        >>> Settings(n_seqs=0)
        Traceback (most recent call last):
        nope_probe.errors.UserError: --n-seqs 0: expected 1 <= n-seqs <= 2147483647
    """

    def __post_init__(self) -> None:
        kind: type = type(self)
        hints = hints_of(kind)
        validate_choices(hints, vars(self))
        validate_types(hints, vars(self))
        for name, hint in hints.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            for bounds in getattr(hint, "__metadata__", ()):
                if isinstance(bounds, Bounds):
                    bounds.validate(flag_of(name), values)
            if Path in leaves_of(hint) and value is not None:
                paths = tuple(map(local_path, values))
                object.__setattr__(self, name, paths if isinstance(value, tuple) else paths[0])

    def chosen(self) -> JsonObject:
        """Return the settings that are not the default, by name."""
        every: Any = self
        values = {field.name: getattr(self, field.name) for field in fields(every)}
        return {f.name: values[f.name] for f in fields(every) if values[f.name] != f.default}

    def typed(self, *program: str) -> str:
        """Return the command line that gives these settings, without those that are the default.

        Args:
            program: the words before the flags.

        Example:
            >>> from nope_probe.ablate import Settings
            >>> Settings(seq_len=32, shuffle=True, remove=("mask", "w_q")).typed("ablate")
            'ablate --shuffle --seq-len 32 --remove mask w_q'
        """
        kind: type = type(self)
        words, hints = [*program], hints_of(kind)
        for name, value in self.chosen().items():
            if isinstance(value, bool):
                words.append(flag_of(name if value else f"no_{name}"))
            elif tyro.conf.Positional in get_args(hints[name]):
                words += map(str, as_tuple(value))
            else:
                words += [flag_of(name), *map(str, as_tuple(value))]
        return shlex.join(words)


def settings_from(kind: type[Chosen], values: Mapping[str, object]) -> Chosen:
    """Return settings from values by name, with tuples for lists and for single values.

    Args:
        kind: the class of the settings.
        values: some of its values.

    Raises:
        UserError: for a name that is no option, with those that are.

    Example:
        >>> from nope_probe.behaviour import Settings
        >>> settings_from(Settings, {"measures": "loss", "remove": ["mask", "mlp"]}).remove
        ('mask', 'mlp')
    """
    dataclass_type: type = kind
    hints, chosen = hints_of(dataclass_type), JsonObject(values)
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"unknown option {name!r}; there are {', '.join(sorted(hints))}")
        if value is not None and takes_several(hints[name]):
            chosen[name] = as_tuple(value)
    return kind(**chosen)


def takes_several(hint: object) -> bool:
    """Return whether values of a type are tuples, or tuples among others."""
    return get_origin(hint) is tuple or any(map(takes_several, get_args(hint)))


@cache
def hints_of(settings: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, with their annotations and their help.

    The help is the field's entry under `Attributes:` in the docstring of a class that declares it,
    or an annotation, where it holds names that the code knows.
    """
    helps: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        entries = cleandoc(kind.__doc__ or "").partition(HELP)[2]
        helps |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(entries)}
    hints: dict[str, Any] = get_type_hints(settings, include_extras=True)
    for name in helps.keys() & hints.keys():
        if not any(getattr(extra, "help", None) for extra in get_args(hints[name])):
            hints[name] = Annotated[hints[name], tyro.conf.arg(help=helps[name])]
    return {field.name: hints[field.name] for field in fields(settings)}


def words_of(chosen: Mapping[str, object]) -> dict[str, str]:
    """Return settings as text, by flag.

    Example:
        >>> words_of({"remove": ("mask", "w_q"), "per_head": True})
        {'--remove': 'mask, w_q', '--per-head': 'yes'}
    """
    yes_or_no = {True: "yes", False: "no"}
    return {
        flag_of(name): yes_or_no[value]
        if isinstance(value, bool)
        else ", ".join(map(str, as_tuple(value)))
        for name, value in chosen.items()
    }


def description_of(settings: type) -> str:
    """Return what the docstring of settings says besides their help."""
    return cleandoc(settings.__doc__ or "").partition(HELP)[0]


def options_of(settings: type) -> Iterator[tuple[Parameter, str]]:
    """Yield the settings as keyword parameters of a function, each with its help."""
    for field in fields(settings):
        plain, *extras = get_args(hints_of(settings)[field.name])
        text = "".join(getattr(extra, "help", None) or "" for extra in extras)
        yield (
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=plain),
            text,
        )


def flag_of(name: str) -> str:
    """Return the flag of a setting.

    Example:
        >>> flag_of("n_seqs")
        '--n-seqs'
    """
    return f"--{name.replace('_', '-')}"


def validate_effects(settings: Any, without_effect: Mapping[str, str]) -> None:
    """Check that no flag without an effect was given another value than its default.

    Args:
        settings: a dataclass.
        without_effect: by setting, the reason, as in `no effect on --data random`.

    Raises:
        UserError: naming the flag, and why it has no effect.
    """
    for field in fields(settings):
        if field.name in without_effect and getattr(settings, field.name) != field.default:
            raise UserError(f"{flag_of(field.name)} has no effect {without_effect[field.name]}")
