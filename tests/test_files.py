"""Paths are absolute behind the door, so that no library reads another file than the one meant."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.command_line import run_command
from support.tiny_models import tokenizer

from nope_probe import simulate
from nope_probe.data.sequences import sequences
from nope_probe.errors import UserError
from nope_probe.files import local_path, read_json
from nope_probe.models.names import resolve
from nope_probe.runtime.folder import read_run

SETTINGS: dict[str, dict[str, Any]] = {
    "ablation": {},
    "behaviour": {},
    "circuit": {},
    "compare": {"runs": ("~/a", Path("b"))},
    "paper": {"figure": "figure2"},
    "repeat": {"run": "~/a"},
    "scores": {},
    "simulation": {},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder, and work in a folder beside it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.mark.usefixtures("unenforced")
@pytest.mark.parametrize("command", SETTINGS)
@pytest.mark.parametrize("out", ["~/x", Path("~/x"), Path("../home/x")])
def test_the_paths_of_every_command_are_absolute(command: str, out: Any, home: Path) -> None:
    module = {"paper": "paper.settings", "repeat": "repeat"}.get(command, f"{command}.run")
    settings = import_module(f"nope_probe.experiments.{module}").Settings(
        out=out, **SETTINGS[command]
    )
    assert settings.out.is_absolute()
    assert settings.out.resolve() == home / "x"
    if command == "compare":
        assert settings.runs == (home / "a", home.parent / "here" / "b")


@pytest.mark.usefixtures("unenforced")
def test_a_number_is_no_path() -> None:
    settings = import_module("nope_probe.experiments.scores.run").Settings
    with pytest.raises(UserError, match="--out 5: expected a path"):
        settings(out=5)


def test_a_run_is_written_to_the_home_folder_that_no_shell_expanded(home: Path) -> None:
    flags = ["--n-samples", 64, "--seq-len", 7, "--n-layers", 2, "--alpha", 0]
    run_command(simulate, *flags, "--out=~/x")
    assert len(read_run("~/x").tables["layers"]) == 2
    assert sorted(path.name for path in home.iterdir()) == ["x"]
    assert list(Path.cwd().iterdir()) == []


def test_a_parquet_file_below_a_folder_named_like_the_home_folder_is_the_one_read(
    home: Path,
) -> None:
    Path("~").mkdir()
    for folder, word in ((Path("./~").absolute(), "here "), (home, "at home ")):
        pd.DataFrame({"text": [word * 60]}).to_parquet(folder / "a.parquet")
    for source, word in (("./~/a.parquet", "here"), ("~/a.parquet", "at home")):
        made = sequences(source, tokenizer=tokenizer(), n_seqs=1, seq_len=20, start="start")
        assert tokenizer().decode(made.inputs[0]).startswith(word)


def test_a_models_folder_is_found_from_the_home_folder(home: Path) -> None:
    (home / "model").mkdir()
    (home / "model" / "config.json").touch()
    assert resolve("~/model") == str(home / "model")


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
