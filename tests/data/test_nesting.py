"""Which JSON is too deep for the parser of data sets, found without parsing it."""

import json
from pathlib import Path

import pytest

from nope_probe import files
from nope_probe.errors import UserError
from nope_probe.files import MOST_LEVELS, validate_nesting

N = 100_000
TOO_DEEP = {
    "arrays": ("a.jsonl", '{"text": "a", "x": ' + N * "[" + N * "]" + "}"),
    "objects": ("a.jsonl", '{"text": "a", "x": ' + N * '{"a":' + "1" + N * "}" + "}"),
    "open arrays": ("a.jsonl", '{"text": "a"}\n' + N * "["),
    "after a string": ("a.jsonl", '{"text": "]]\\"]]' + N * "]" + '", "x": ' + N * "["),
    "a level too many": ("a.jsonl", (MOST_LEVELS + 1) * "[" + (MOST_LEVELS + 1) * "]"),
    "over lines": ("a.json", N * "[\n" + N * "]\n"),
    "in a folder": ("train/a.json", N * '{"a":' + "1" + N * "}"),
}
SHALLOW = {
    "no level too many": ("a.jsonl", MOST_LEVELS * "[" + MOST_LEVELS * "]"),
    "brackets in text": ("a.jsonl", json.dumps({"text": N * '["{'})),
    "many in a row": ("a.jsonl", "[" + N * "[],{}," + "[]]"),
    "many rows": ("a.jsonl", N * '{"text": [\n'),
    "another kind of file": ("a.txt", N * "["),
}


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("row", TOO_DEEP)
def test_a_file_that_is_nested_too_deep_is_named(row: str, tmp_path: Path) -> None:
    write(tmp_path, *TOO_DEEP[row])
    with pytest.raises(UserError) as refused:
        validate_nesting(tmp_path)
    path = tmp_path / TOO_DEEP[row][0]
    assert str(refused.value) == f"{path} holds JSON that is nested more than 1000 deep"


@pytest.mark.parametrize("row", SHALLOW)
def test_other_files_pass(row: str, tmp_path: Path) -> None:
    write(tmp_path, *SHALLOW[row])
    validate_nesting(tmp_path)


def test_a_large_folder_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.jsonl", "{}\n")
    write(tmp_path, "b.jsonl", N * "[")
    monkeypatch.setattr(files, "MOST_BYTES", N)
    validate_nesting(tmp_path)
    monkeypatch.setattr(files, "MOST_BYTES", N + 3)
    with pytest.raises(UserError, match=r"b\.jsonl holds JSON"):
        validate_nesting(tmp_path)
