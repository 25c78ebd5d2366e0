"""Commands as a user types them, in this process."""

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import plotly.graph_objects as go
import pytest

from nope_probe.studies.commands import COMMANDS


def run_command(command: ModuleType, *arguments: object) -> None:
    """Run a command's module with arguments; a command that ends early raises `SystemExit`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
        command.main()


def module_of(command: str) -> ModuleType:
    """Return the module of a command of the package, or of a recipe's script."""
    return import_module(f"nope_probe.{command}" if command in COMMANDS else command)


def leaves_of(hint: object) -> Iterator[object]:
    """Yield the types and the words of `Literal`s in a type, of unions and sequences too."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal or not arguments:
        yield from arguments or [hint]
        return
    for argument in arguments[:1] if get_origin(hint) is Annotated else arguments:
        if argument is not Ellipsis:
            yield from leaves_of(argument)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def ended(command: str, arguments: Iterable[str], folder: Path) -> Ended:
    """Run a command by its name in a folder."""
    code = 0
    with (
        chdir(folder),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            run_command(module_of(command), *arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def draw_without_chrome(patch: pytest.MonkeyPatch) -> None:
    """Make everything of an image but Chrome's drawing."""

    def draw(figure: go.Figure, path: Path, **_: Any) -> None:
        Path(path).write_text(figure.to_json())

    patch.setattr(go.Figure, "write_image", draw)


def refused(
    capfd: pytest.CaptureFixture[str],
    folder: Path,
    command: ModuleType,
    *arguments: object,
    code: int = 2,
) -> str:
    """Run a command in a folder and return the one line in which it refuses.

    It has to end with an exit code, to print nothing on stdout and to leave the folder as it was.
    """
    folder.mkdir(exist_ok=True)
    before = sorted(folder.rglob("*"))
    capfd.readouterr()
    with chdir(folder), pytest.raises(SystemExit) as exit_code:
        run_command(command, *arguments)
    printed = capfd.readouterr()
    assert exit_code.value.code == code
    assert printed.out == ""
    assert sorted(folder.rglob("*")) == before
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")
