"""The command line: settings parsed by tyro, and errors in one line on stderr."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from nope_probe.errors import UserError, printable

Settings = TypeVar("Settings")
IMAGE = "image"
IMAGE_HELP = "Draw the first figure of the page into this .png or .svg file too (needs Chrome)."
ENDINGS = (".png", ".svg")


def parse(settings: type[Settings]) -> Settings:
    """Return the settings on the command line; the class's docstring is the help."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name}" if module else None
    return tyro.cli(settings, prog=program, description=inspect.cleandoc(settings.__doc__ or ""))


def parse_with_image(settings: type[Settings]) -> tuple[Settings, Path | None]:
    """Return the settings on the command line, and the image file named by `--image`, if any.

    Raises:
        UserError: for an image of another kind than .png or .svg.
    """
    image = (IMAGE, Annotated[Path | None, tyro.conf.arg(help=IMAGE_HELP)], None)
    # A subclass, since a field of the settings themselves would identify the run.
    both = make_dataclass(settings.__name__, [image], bases=(settings,), frozen=True, kw_only=True)
    both.__doc__ = settings.__doc__
    parsed: Any = parse(both)
    path = getattr(parsed, IMAGE)
    if path is not None and path.suffix not in ENDINGS:
        raise UserError(f"cannot draw {path}: expected a name that ends in {' or '.join(ENDINGS)}")
    own = {field.name: getattr(parsed, field.name) for field in fields(parsed)[:-1]}
    return settings(**own), path


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
        sys.stderr.write(f"{printable(message)}\n")
    sys.exit(code)
