"""The errors that commands print in one line, how it is printed, and the door for choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from inspect import signature
from numbers import Integral
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError


class UserError(ValueError):
    """Raised for a request that cannot be carried out; its text is one line that says why.

    Commands print it on stderr and exit, without a traceback.

    Attributes:
        exit_code: of the process: 2 for a user's mistake.
    """

    exit_code: ClassVar[int] = 2


class MachineError(UserError):
    """Raised where the request is right and the machine, or the process's environment, is not.

    Causes are `WORLD_SIZE` without the other variables of torchrun, or a full disk.
    """

    exit_code: ClassVar[int] = 1


class StorageError(MachineError):
    """Raised where results cannot be written or read; what was saved before stays."""


class TooFewLayersError(UserError):
    """Raised where a model has fewer layers than were requested."""

    def __init__(self, source: str, *, depth: int, requested: int) -> None:
        super().__init__(
            f"{source} has {depth} layers, {requested} were asked for; try --layers all"
        )


@cache
def _adapter(hint: Any) -> TypeAdapter:  # beartype knows no subscript of it
    return TypeAdapter(hint, config=ConfigDict(strict=True))


def validate_types(
    hints: Mapping[str, object], values: Mapping[str, object], spelled: Callable[[str], str] = str
) -> dict[str, object]:
    """Check values against their types: numbers and their bounds, texts, choices, tuples of these.

    Args:
        hints: the types by name.
        values: the values by name.
        spelled: how an error spells a name.

    Returns:
        the values as pydantic reads them, strictly: a whole number is a number too.

    Raises:
        UserError: naming the argument, the value, and the choices, type or bounds.

    Example:
        >>> validate_types({"seed": int | None}, {"seed": "7"})
        Traceback (most recent call last):
        nope_probe.errors.UserError: seed '7' should be a valid integer
    """
    read = {}
    for name, hint in hints.items():
        try:
            read[name] = _adapter(hint).validate_python(values[name])
        except ValidationError as error:
            mistakes = error.errors(include_url=False)
            if refused := mistakes[0].get("ctx", {}).get("error"):
                raise refused from None
            expected = dict.fromkeys(entry["msg"].removeprefix("Input ") for entry in mistakes)
            given = mistakes[0]["input"]
            raise UserError(f"{spelled(name)} {given!r:.60} {' or '.join(expected)}") from None
    return read


def kind_of(value: object) -> str:
    """Return what a value is, in the words of an error: its type, and the shape of an array.

    Example:
        >>> kind_of({"mask": 1}), kind_of(None)
        ('dict', 'None')
    """
    shape = getattr(value, "shape", None)
    name = "None" if value is None else type(value).__name__
    return name if shape is None else f"{name} {[*shape]}"


def validate_layer_numbers(layers: object) -> None:
    """Check that layers are given by their numbers, several or none.

    Raises:
        UserError: for a single number, a text, or what is no whole number.

    Example:
        >>> validate_layer_numbers(1)
        Traceback (most recent call last):
        nope_probe.errors.UserError: expected the numbers of layers, such as [0, 1], got 1
    """
    if not is_of_numbers(layers):
        raise UserError(f"expected the numbers of layers, such as [0, 1], got {layers!r:.60}")


def is_of_numbers(given: object) -> bool:
    """Return whether something holds whole numbers only, several or none."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        return False
    return all(isinstance(one, Integral) and not isinstance(one, bool) for one in given)


def takes_arguments(function: Callable[..., object], n: int) -> bool:
    """Return whether a function takes n positional arguments; True where Python cannot say."""
    try:
        signature(function).bind(*[None] * n)
    except TypeError:
        return False
    except ValueError:  # a function of a library in C, without a signature
        return True
    return True


def as_tuple(value: object) -> tuple[object, ...]:
    """Return the elements of a collection, or a single value or word, as a tuple."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def line_of(error: UserError | OSError | MemoryError) -> tuple[str, int]:
    """Return the line that a command ends in and its exit code, for an error not of the code."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return f"out of memory ({error})", MachineError.exit_code
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or ' '.join(str(error).split())}", MachineError.exit_code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest of known names; empty if none is near.

    Example:
        >>> did_you_mean("laers", ["layers", "seed"])
        'did you mean layers?'
    """
    near = get_close_matches(name, [*known], n=1)
    return f"did you mean {near[0]}?" if near else ""


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with every character escaped that a terminal would not show.

    Args:
        text: the text, such as a file's name.
        keep: characters to leave as they are.

    Example:
        >>> printable("a\x1b[31mb\nc"), printable("a\nb", keep="\n")
        ('a\\x1b[31mb\\nc', 'a\nb')
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


_SURROGATE = re.compile("[\ud800-\udfff]")


def validate_unicode(where: object, text: str) -> None:
    """Check that a text is Unicode, which tokenizers and files take.

    Args:
        where: what the text is, such as a file and its line.
        text: the text.

    Raises:
        UserError: naming the first lone surrogate and its place.
    """
    lone = _SURROGATE.search(text)
    if lone is not None:
        code = ord(lone[0])
        is_byte = 0xDC80 <= code <= 0xDCFF  # as Python reads a byte that is no character
        byte = f", or the byte 0x{code - 0xDC00:02X}, which is not UTF-8" if is_byte else ""
        raise UserError(
            f"{where} holds U+{code:04X} at position {lone.start()}, a lone surrogate: half of a "
            f"character{byte}. Write the text in UTF-8, or leave it out, as "
            "text.encode(errors='ignore').decode() does"
        )


def beyond_context(seq_len: int, n_ctx: int, *, has_table: bool = False) -> UserError:
    """Return the error for a sequence beyond the context without `--beyond-context`.

    Args:
        seq_len: its tokens.
        n_ctx: the model's context.
        has_table: whether the model looks positions up in a table, which ends there.
    """
    in_table = ", where its table of positions ends: --beyond-context cannot help, take"
    way_out = in_table if has_table else ": take --beyond-context, or"
    return UserError(
        f"--seq-len {seq_len} is beyond the model's context {n_ctx}{way_out} shorter sequences"
    )
