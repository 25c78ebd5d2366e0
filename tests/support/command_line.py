"""Commands as a user types them, in this process."""

import sys
from pathlib import Path
from typing import Any

import pytest


def run(monkeypatch: pytest.MonkeyPatch, command: Any, *arguments: object) -> None:
    """Run a command's module with arguments."""
    monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
    command.main()


def refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    where: Path,
    command: Any,
    *arguments: object,
) -> str:
    """Run a command that has to refuse in one line and write nothing, and give what it says."""
    where.mkdir(exist_ok=True)
    monkeypatch.chdir(where)
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_code:
        run(monkeypatch, command, *arguments)
    said = capfd.readouterr()
    assert exit_code.value.code == 2
    assert said.out == ""
    assert not list(where.iterdir())
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")
