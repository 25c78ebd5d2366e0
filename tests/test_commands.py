"""What all commands have in common: quick help, the umbrella command, no flag without an effect."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from inspect import getdoc
from pathlib import Path

import pytest
from command_reference import command_text, commands, flags_of, settings_of
from support.command_line import leaves_of, run_command

from nope_probe import __main__ as umbrella
from nope_probe import ablate, load
from nope_probe.cli import parse
from nope_probe.run.flags import hints_of
from nope_probe.studies.commands import COMMANDS

ROOT = Path(__file__).parent.parent
SLOW = {"torch", "transformer_lens", "transformers", "scipy", "pandas", "numpy", "plotly"}


def test_every_command_is_in_the_table_and_has_a_script_that_is_installed() -> None:
    assert {*COMMANDS} == {
        path.stem for path in (ROOT / "nope_probe").glob("*.py") if "\nmain = " in path.read_text()
    }
    for module, (name, command) in zip(commands(), COMMANDS.items(), strict=True):
        assert module.main.args == (command,)
        assert module.Settings is command.settings
        assert command.settings.command == name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scripts = {f"nope-probe-{name}": f"nope_probe.{name}:main" for name in COMMANDS}
    assert project["scripts"] == {"nope-probe": "nope_probe.__main__:main"} | scripts


def test_help_imports_nothing_slow() -> None:
    targets = [("nope_probe", "ablate"), *((f"nope_probe.{name}",) for name in COMMANDS)]
    code = "import runpy, sys\n"
    for target, *arguments in targets:
        code += f"sys.argv = {['x', *arguments, '--help']}\n"
        code += f"try: runpy.run_module('{target}', run_name='__main__', alter_sys=True)\n"
        code += "except SystemExit as end: assert end.code == 0\n"
    code += f"print('loaded:', *{SLOW} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "loaded:"
    assert "usage: python -m nope_probe ablate [-h]" in ended.stdout
    for shown in ended.stdout.split("usage: ")[1:]:
        assert "\n    " not in shown.partition("options")[0].partition("\n\n")[2]


@pytest.mark.parametrize("columns", ["0", "1", "-3", "many"])
def test_a_terminal_of_any_width_gets_the_help_and_the_result(
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A container's terminal may have no columns."""
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        run_command(ablate, "--help")
    assert capsys.readouterr().out.count("\n") > 100
    flags = ["--n-seqs", 8, "--seq-len", 11, "--layers", 1, "--remove", "none"]
    run_command(ablate, "--model", "rope-tiny", *flags, "--out", tmp_path / "run")
    assert f"open {tmp_path / 'run' / 'report.html'}" in capsys.readouterr().out


def nope_probe(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run `nope-probe` with arguments."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/nope-probe", *arguments])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    umbrella.main()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_umbrella_lists_every_command_with_the_first_line_of_its_docstring(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nope_probe(monkeypatch, *arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: nope-probe COMMAND [OPTIONS]"
    words = [line.split(maxsplit=1) for line in lines]
    listed = {pair[0]: pair[1] for pair in words if len(pair) == 2}
    for name in COMMANDS:
        documented = import_module(f"nope_probe.{name}").__doc__
        assert documented is not None
        assert listed[name] == documented.splitlines()[0]


def test_a_typo_is_one_line_that_lists_what_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        nope_probe(monkeypatch, "ablat", "--model", "nope-tiny")
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: no command 'ablat'; did you mean ablate? there are ablate, ")
    assert line.endswith(", ".join(COMMANDS))


def test_the_umbrella_runs_the_command_with_the_arguments_after_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        nope_probe(monkeypatch, "compare", "no-run", "other")
    assert "no-run" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_the_reference_page_have_the_same_flags_and_two_examples(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit, match="0"):
        nope_probe(monkeypatch, command, "--help")
    shown, module = output.getvalue(), import_module(f"nope_probe.{command}")
    assert shown.startswith(f"usage: nope-probe {command} [-h]")
    assert len(module.Settings.examples) == 2
    for example in module.Settings.examples:
        assert f"\n  nope-probe {command} {example}".rstrip() + "\n" in shown
    described = getdoc(module.Settings).partition("\n\n")[0]
    assert " ".join(described.split()) in " ".join(shown.split())
    flags = flags_of(settings_of(module))
    on_page = {word for flag, _, _ in flags for word in flag.split() if word.startswith("--")}
    assert on_page == {*re.findall(r"(?<![\w-])--[a-z][\w-]*", shown)} - {"--help"}
    text = " ".join(command_text(module).replace("`", "").split())
    for _, _, documented in flags:
        words = documented.replace("`", "").split()
        assert words
        assert " ".join(words) in text


def another_value(hint: object, default: object) -> object:
    """Return a value of a flag that is not its default."""
    if isinstance(default, bool):
        return not default
    leaves = [leaf for leaf in leaves_of(hint) if leaf not in (default, type(None))]
    words = [leaf for leaf in leaves if isinstance(leaf, str)]
    values = {str: "it's L1H3", Path: Path("/some where/file"), int: 23, float: 0.25}
    value = words[-1] if words else values[leaves[-1]]
    return (value, value) if isinstance(default, tuple) or "tuple[" in str(hint) else value


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_of_a_run_has_each_setting_that_is_not_the_default(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = import_module(f"nope_probe.{command}").Settings
    assert settings().typed() == f"python -m nope_probe.{command}"
    hints = hints_of(settings)
    flags = [field for field in fields(settings) if "Suppress" not in str(hints[field.name])]
    given = {field.name: another_value(hints[field.name], field.default) for field in flags}
    given |= {"model": "gpt2"} if "model" in given else {}  # else that of the adapter
    if "layers" in given and str in {*leaves_of(hints["layers"])}:
        given |= {"layers": "7:9"}
    chosen = settings(**given)
    assert chosen.chosen() == given
    monkeypatch.setattr(sys, "argv", shlex.split(chosen.typed())[2:])
    assert parse(settings) == (chosen, {})


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_a_version(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        nope_probe(monkeypatch, *filter(None, [command]), "--version")
    assert capsys.readouterr().out == f"nope-probe {version('nope-probe')}\n"


def test_a_range_of_layers_is_run_from_the_first_and_reported_alone() -> None:
    whole = ablate.Settings(layers="1:3")
    info = load("rope-tiny", n_layers=whole.depth).info
    assert (info.n_layers, whole.layers_with_maps(info)) == (3, (1, 2))
    assert ablate.Settings(layers=3).layers_with_maps(info) == (0, 1, 2)


def test_a_parameter_free_model_takes_vectors_unless_data_is_given() -> None:
    assert ablate.Settings(model="parameter-free-RoPE").data == "gaussian"
    typed = ablate.Settings(model="parameter-free").typed()
    assert typed == "python -m nope_probe.ablate --model parameter-free"
