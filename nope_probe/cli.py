"""The command line: settings parsed by tyro, and errors in one line on stderr."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, make_dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from nope_probe.errors import UserError, printable

Settings = TypeVar("Settings")
_subcommand: ContextVar[str | None] = ContextVar("subcommand", default=None)
IMAGE = "image"
IMAGE_HELP = "Draw the first figure of the page into this .png or .svg file too (needs Chrome)."
ENDINGS = (".png", ".svg")


def parse(settings: type[Settings], examples: Sequence[str] = ()) -> Settings:
    """Return the settings on the command line; the class's docstring is the help.

    Args:
        settings: a dataclass.
        examples: arguments of the command, which its help shows after the command as it was typed.
    """
    subcommand = _subcommand.get()
    typed = " ".join([*program(), *([] if subcommand is None else [subcommand])])
    lines = [inspect.cleandoc(settings.__doc__ or "")]
    if examples:
        lines += ["", "Examples:", *(f"  {typed} {each}".rstrip() for each in examples)]
    return tyro.cli(settings, prog=typed, args=typed_arguments(), description="\n".join(lines))


def parse_with_image(
    settings: type[Settings], examples: Sequence[str] = ()
) -> tuple[Settings, Path | None]:
    """Return the settings on the command line, and the image file named by `--image`, if any.

    Raises:
        UserError: for an image of another kind than .png or .svg.
    """
    image = (IMAGE, Annotated[Path | None, tyro.conf.arg(help=IMAGE_HELP)], None)
    # A subclass, since a field of the settings themselves would identify the run.
    both = make_dataclass(settings.__name__, [image], bases=(settings,), frozen=True, kw_only=True)
    both.__doc__ = settings.__doc__
    parsed: Any = parse(both, examples)
    path = getattr(parsed, IMAGE)
    if path is not None and path.suffix not in ENDINGS:
        raise UserError(f"cannot draw {path}: expected a name that ends in {' or '.join(ENDINGS)}")
    own = {field.name: getattr(parsed, field.name) for field in fields(parsed)[:-1]}
    return settings(**own), path


def typed_arguments() -> list[str]:
    """Return the arguments of the command, after its name if the umbrella command was typed."""
    return sys.argv[1:] if _subcommand.get() is None else sys.argv[2:]


def program() -> list[str]:
    """Return the words that started this process, as they can be typed again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        return [Path(sys.argv[0]).name]
    return ["python", "-m", module.name.removesuffix(".__main__")]


def run_subcommand() -> None:
    """Run the command that the first argument names, or list all commands.

    Raises:
        UserError: for a name that is no command.
    """
    commands, given = find_commands(), sys.argv[1:2]
    if given in ([], ["--help"], ["-h"]):
        sys.stdout.write(overview(commands))
        return
    (name,) = given
    if name not in commands:
        near = get_close_matches(name, commands, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"no command {name!r}; {meant}there are {', '.join(commands)}")
    token = _subcommand.set(name)
    try:
        import_module(f"nope_probe.{name}").main()
    finally:
        _subcommand.reset(token)


def find_commands() -> dict[str, str]:
    """Return the first line of each command's docstring by its name, without importing any."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        has_main = any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body)
        if has_main:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def overview(commands: dict[str, str]) -> str:
    """Return the help of the umbrella command: what each command does, in one line."""
    typed = " ".join(program())
    lines = [
        f"usage: {typed} COMMAND [OPTIONS]",
        "",
        "Find where a decoder's positional attention pattern comes from: the causal mask, RoPE, or",
        "the learned weights.",
        "",
        "commands:",
        *(f"  {name:<10} {line}" for name, line in commands.items()),
        "",
        "examples:",
        f"  {typed} ablate --model rope-tiny",
        f"  {typed} circuit --help",
    ]
    return "\n".join(lines) + "\n"


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
