"""The errors that commands print in one line, how it is printed, and the door for choices."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from inspect import signature, unwrap
from tempfile import TemporaryFile
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_UNWRITABLE = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
)


class UserError(ValueError):
    """Raised for a request that cannot be carried out; its text is one line that says why.

    Commands print it on stderr and exit, without a traceback.

    Attributes:
        exit_code: of the process: 2 for a user's mistake.
        prints: whether this process prints it; by default, the first of a machine's does.
    """

    exit_code: ClassVar[int] = 2
    prints: bool | None = None


class MachineError(UserError):
    """Raised where the request is right and the machine, or the process's environment, is not.

    Such as `WORLD_SIZE` without the other variables of torchrun, or a disk that is full.
    """

    exit_code: ClassVar[int] = 1


class StorageError(MachineError):
    """Raised where results cannot be written or read; what was saved before stays."""


class TooFewLayersError(UserError):
    """Raised where a model has fewer layers than were requested.

    Attributes:
        source: the model.
        depth: how many layers it has.
    """

    def __init__(self, source: str, *, depth: int, requested: int) -> None:
        super().__init__(
            f"{source} has {depth} layers, {requested} were asked for; try --layers all"
        )
        self.source, self.depth = source, depth


def closed_choices(
    *names: str,
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Return a decorator that checks some arguments of a public function against their `Literal`s.

    Args:
        names: the arguments.

    Example:
        >>> from nope_probe import sequences
        >>> sequences(tokenizer=None, bos="Always")
        Traceback (most recent call last):
        nope_probe.errors.UserError: unknown bos 'Always'; there are auto, always, never
    """

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        parameters = list(signature(function).parameters)

        @cache
        def hints() -> dict[str, object]:
            # Only these arguments': the types of others may be imported for type checkers alone.
            written = unwrap(function)
            some = SimpleNamespace(__annotations__={n: written.__annotations__[n] for n in names})
            return get_type_hints(some, written.__globals__)

        @wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            validate_choices({n: hints()[n] for n in names if n in given}, given)
            return function(*args, **kwargs)

        return checked

    return decorate


def validate_choices(hints: Mapping[str, object], values: Mapping[str, object]) -> None:
    """Check values, or the elements of sequences, against the `Literal`s in their types.

    Args:
        hints: the types by name; one without a `Literal` accepts everything, and a number or None
            beside a `Literal` is left alone.
        values: the values by name.

    Raises:
        UserError: naming the argument, the value and the choices.
    """
    for name, hint in hints.items():
        kinds, value = list(_members(hint)), values[name]
        words, of_elements = _words(kinds), _words(_elements(kinds))
        if isinstance(value, Collection) and of_elements and not (words and isinstance(value, str)):
            unknown = [each for each in value if each not in of_elements]
        elif not words or (value is None and NoneType in kinds):
            unknown = []
        else:
            is_closed = isinstance(value, str) or not {int, float, str} & {*kinds}
            unknown = [value] if is_closed and str not in kinds and value not in words else []
        if unknown:
            number = ", or a number" if {int, float} & {*kinds} else ""
            known = ", ".join(map(str, words or of_elements))
            raise UserError(f"unknown {name} {unknown[0]!r}; there are {known}{number}")


def _members(hint: object) -> Iterator[object]:
    """Yield the types that a type is a union of, without annotations."""
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _members(get_args(hint)[0])
    elif origin in (Union, UnionType):
        for each in get_args(hint):
            yield from _members(each)
    else:
        yield hint


def _elements(kinds: Collection[object]) -> list[object]:
    """Return the types of the elements of the sequences among some types."""
    sequences = [each for each in kinds if get_origin(each) not in (None, Literal)]
    return [kind for each in sequences for kind in _members(get_args(each)[0])]


def _words(kinds: Collection[object]) -> list[object]:
    """Return the choices of the `Literal`s among some types."""
    return [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]


def is_unwritable(error: OSError) -> bool:
    """Return whether a file could not be written for want of room, right or a working disk."""
    return error.errno in _UNWRITABLE


def line_of(error: BaseException) -> tuple[str, int] | None:
    """Return the line that a command ends in and its exit code, unless the code is at fault."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or ' '.join(str(error).split())}", MachineError.exit_code
    if isinstance(error, MemoryError):
        return f"out of memory ({error})", MachineError.exit_code
    return None


def exit_code_of(signum: int) -> int:
    """Return the exit code of a process that a signal ends: 128 and its number."""
    return 128 + signum


def is_rust_error(error: BaseException) -> bool:
    """Return whether an error is one that a library in Rust raises without a class of its own.

    `tokenizers` raises a bare Exception. A panic is a BaseException whose class has no name that
    can be imported.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def stderr_held(*errors: type[BaseException]) -> Iterator[None]:
    """Keep a library that raises an error from printing its own messages, past Python, as well.

    All that is written on the process's standard error within the context appears after it, or not
    at all after a panic in Rust or another of these errors.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # closed: nothing can be printed
        yield
        return
    with TemporaryFile() as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        told = False
        try:
            yield
        except BaseException as error:
            told = is_rust_error(error) or isinstance(error, errors)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            if not told:
                held.seek(0)
                os.write(2, held.read())


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
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )
