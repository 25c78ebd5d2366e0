"""The reference page of the commands against what tyro parses and prints."""

import contextlib
import io
import re
from types import ModuleType

import pytest
import tyro
from command_reference import command_text, commands, flags_of, settings_of, values_text

COMMANDS = {module.__name__.rpartition(".")[2]: module for module in commands()}


def help_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.argv", ["command", "--help"])
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit):
        module.main()
    return output.getvalue()


def test_the_page_has_the_commands_of_the_project():
    assert {"ablate", "behaviour", "circuit", "reproduce", "scores", "theory"} <= {*COMMANDS}
    assert not {"cli", "errors"} & {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_of_the_page_are_those_of_the_help(name: str, monkeypatch: pytest.MonkeyPatch):
    flags = flags_of(settings_of(COMMANDS[name]))
    shown = {word for flag, _, _ in flags for word in flag.split() if word.startswith("--")}
    printed = {*re.findall(r"(?<![\w-])--[a-z][\w-]*", help_of(COMMANDS[name], monkeypatch))}
    assert shown == printed - {"--help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_each_flags_help(name: str):
    text = command_text(COMMANDS[name])
    for _, _, documented in flags_of(settings_of(COMMANDS[name])):
        words = documented.replace("`", "").split()
        assert words
        assert " ".join(words) in " ".join(text.replace("`", "").split())


@pytest.mark.parametrize("name", ["ablate", "scores"])
def test_the_default_of_a_flag_is_the_one_that_is_parsed(name: str):
    settings = COMMANDS[name].Settings
    defaults = {flag.split()[0]: default for flag, default, _ in flags_of(settings)}
    parsed = tyro.cli(settings, args=[])
    assert defaults["--seq-len"] == str(parsed.seq_len)
    assert defaults["--model"] == parsed.model
    assert defaults["--out"] == ""


def test_values_are_written_as_in_the_help():
    assert values_text(tuple[str, ...] | None) == "[TEXT ...]"
    assert values_text(int) == "INT"
