"""Paths are absolute behind the door, so that no library reads another file than the one meant."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.command_line import run_command
from support.tiny_models import tokenizer

from nope_probe import UserError, ablate, files, read_run, sequences
from nope_probe.files import local_path, read_json, reading, validate_nesting
from nope_probe.studies.commands import COMMANDS

SETTINGS = {name: command.settings for name, command in COMMANDS.items()}
# Flags that a command cannot do without, and further paths.
GIVEN: dict[str, dict[str, Any]] = {"compare": {"runs": ("~/a", Path("b"))}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder, and work in a folder beside it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.mark.wrong_types
@pytest.mark.parametrize("command", [n for n in SETTINGS if hasattr(SETTINGS[n], "out")])
def test_the_paths_of_every_command_are_absolute(command: str, home: Path) -> None:
    for out in ("~/x", Path("../home/x")):
        settings = SETTINGS[command](out=out, **GIVEN.get(command, {}))
        assert settings.out.is_absolute()
        assert settings.out.resolve() == home / "x"
    if command == "compare":
        assert settings.runs == (home / "a", home.parent / "here" / "b")


def test_a_run_is_written_to_the_home_folder_that_no_shell_expanded(home: Path) -> None:
    flags = ["--remove", "none", "--layers", 2, "--n-seqs", 8, "--seq-len", 11, "--folds", 4]
    run_command(ablate, *flags, "--out=~/x")
    assert {*read_run("~/x").tables["pattern"]["layer"]} == {0, 1}
    assert sorted(path.name for path in home.iterdir()) == ["x"]
    assert list(Path.cwd().iterdir()) == []


def test_a_parquet_file_below_a_folder_named_like_the_home_folder_is_the_one_read(
    home: Path,
) -> None:
    Path("~").mkdir()
    for folder, word in ((Path("./~").absolute(), "here "), (home, "at home ")):
        pd.DataFrame({"text": [word * 60]}).to_parquet(folder / "a.parquet")
    for source, word in (("./~/a.parquet", "here"), ("~/a.parquet", "at home")):
        made = sequences(source, tokenizer=tokenizer(), n_seqs=1, seq_len=20, windows="start")
        assert tokenizer().decode(made.inputs[0]).startswith(word)


def test_names_that_are_no_urls_are_paths(home: Path) -> None:
    assert local_path("~nosuchuser/a") == Path.cwd() / "~nosuchuser/a"
    assert local_path("a:b/c") == Path.cwd() / "a:b/c"


def test_json_that_cannot_be_read_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"[" * 100_000, b"{", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"nested|Expecting|decode"):
            read_json(path)
    path.write_text(json.dumps({"a": 1}))
    assert read_json(path) == {"a": 1}


PanicException = type("PanicException", (BaseException,), {})  # as tokenizers raises


@pytest.mark.parametrize(
    "error", [KeyError("swish"), RecursionError("deep"), Exception("rust"), PanicException("panic")]
)
def test_what_a_library_raises_is_one_line_with_its_reason(error: BaseException) -> None:
    with pytest.raises(UserError) as refused, reading("cannot load a: config.json"):
        raise error
    assert "cannot load a: config.json: " in str(refused.value)
    assert str(error) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "error", [UserError("ours"), torch.OutOfMemoryError("full"), KeyboardInterrupt()]
)
def test_what_is_no_librarys_error_about_a_file_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as passed, reading("cannot load a"):
        raise error
    assert passed.value is error


N = 100_000
NESTED = {  # a row, and whether it is nested too deep
    "objects": ('{"text": "a", "x": ' + N * '{"a":' + "1" + N * "}" + "}", True),
    "lists": ('{"text": "]]", "x": ' + N * "[" + N * "]" + "}", True),
    "brackets in text": (json.dumps({"text": N * '["{'}), False),
    "many in a row": ("[" + N * "[],{}," + "[]]", False),
}


@pytest.mark.parametrize("row", NESTED)
def test_a_file_that_is_nested_too_deep_is_named_and_others_pass(row: str, tmp_path: Path) -> None:
    content, is_too_deep = NESTED[row]
    (tmp_path / "a.jsonl").write_text(content)
    named = pytest.raises(UserError, match=f"cannot read {tmp_path / 'a.jsonl'}: ")
    with named if is_too_deep else nullcontext():
        validate_nesting(tmp_path)


def test_a_large_folder_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.jsonl").write_text(N * "[")
    monkeypatch.setattr(files, "MOST_BYTES", N)
    validate_nesting(tmp_path)
    monkeypatch.setattr(files, "MOST_BYTES", N + 3)
    with pytest.raises(UserError, match=r"b\.jsonl"):
        validate_nesting(tmp_path)
