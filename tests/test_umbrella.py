"""The umbrella command `nope-probe`: what it lists, runs and refuses."""

import subprocess
import sys
from importlib import import_module

import pytest

from nope_probe import __main__ as umbrella
from nope_probe.cli import find_commands
from nope_probe.runtime.identity import command_line

COMMANDS = sorted(find_commands())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/nope-probe", *arguments])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    umbrella.main()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_it_lists_every_command_with_the_first_line_of_its_docstring(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: nope-probe COMMAND [OPTIONS]"
    for name in COMMANDS:
        doc = import_module(f"nope_probe.{name}").__doc__
        assert doc is not None
        assert [line.split(maxsplit=1)[1] for line in lines if line.split()[:1] == [name]] == [
            doc.splitlines()[0]
        ]


def test_a_typo_is_one_line_that_lists_what_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "ablat", "--model", "nope-tiny")
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: no command 'ablat'; did you mean ablate? there are ablate, ")
    assert line.endswith(", ".join(COMMANDS))


def test_it_runs_the_command_with_the_arguments_after_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "theory", "--seq-len", "5", "--n-layers", "1")
    assert "n = 5: L0 is flat; the pattern begins in L1" in capsys.readouterr().out
    assert command_line() == "nope-probe theory --seq-len 5 --n-layers 1"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_command_as_typed_and_two_examples(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, command, "--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith(f"usage: nope-probe {command} [-h]")
    module = import_module(f"nope_probe.{command}")
    assert len(module.EXAMPLES) == 2
    for example in module.EXAMPLES:
        assert f"\n  nope-probe {command} {example}".rstrip() + "\n" in shown


def test_python_m_runs_it_too_without_torch() -> None:
    code = "import runpy, sys; sys.argv = ['x', 'scores', '--help']\n"
    code += "try: runpy.run_module('nope_probe', run_name='__main__', alter_sys=True)\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("usage: python -m nope_probe scores [-h]")
    assert ended.stdout.endswith("False\n")
