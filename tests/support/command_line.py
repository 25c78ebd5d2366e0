"""Commands as a user types them, in this process."""

import sys
from contextlib import chdir
from pathlib import Path
from types import ModuleType

import pytest


def run_command(command: ModuleType, *arguments: object) -> None:
    """Run a command's module with arguments; a command that ends early raises `SystemExit`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
        command.main()


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
