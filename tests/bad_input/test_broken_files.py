"""Broken files of models, of data and of runs: one line that names the file and the cause.

Each row of a table is something broken and a part of the line that has to say so. Every one ends
with exit code 2, one line on stderr, nothing on stdout, and nothing left behind.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pandas as pd
import pytest
from support.broken_models import DEEP, NO_TOKENS, ROWS, tokenizer_with
from support.command_line import refused
from support.refused_models import write_llama

from nope_probe import ablate, behaviour, circuit, compare, layers, reproduce, scores, train
from nope_probe.errors import UserError
from nope_probe.runtime.folder import read_run
from nope_probe.runtime.identity import json_checksum

SMALL = ["--layers", 1, "--n-seqs", 16, "--seq-len", 16, "--folds", 4]
TEXT = "in the other one there is more than that " * 20
ROW = json.dumps({"text": TEXT}) + "\n"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with nothing broken."""
    return write_llama(tmp_path_factory.mktemp("whole") / "model")


@pytest.mark.parametrize("row", ROWS)
def test_a_broken_model_is_one_line(
    row: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    apply, says = ROWS[row]
    folder = Path(copytree(whole, tmp_path / "model"))
    apply(folder)
    line = refused(capfd, tmp_path / "here", layers, "--model", folder)
    assert says in line
    assert str(folder) in line
    assert len(line) < 300 + 2 * len(str(folder)) + 100


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_one_line(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(copytree(whole, tmp_path / "model"))
    tokenizer_with(model=NO_TOKENS)(folder)
    line = refused(capfd, tmp_path / "here", scores, *SMALL, "--model", folder)
    assert line.startswith(f"the tokenizer of {folder} cannot take the text: ")


@pytest.mark.parametrize("command", [ablate, scores, circuit, behaviour])
def test_other_commands_refuse_a_broken_model_too(
    command: object, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    apply, says = ROWS["sizes: 1e9 layers"]
    folder = Path(copytree(whole, tmp_path / "model"))
    apply(folder)
    first = ["--layer", 0] if command is circuit else ["--layers", 1]
    first = ["--seq-len", 64] if command is behaviour else first
    line = refused(capfd, tmp_path / "here", command, "--model", folder, *first)
    assert says in line


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def doubled(path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.Table.from_arrays([pa.array([TEXT])] * 2, names=["text", "text"]), path)


def table(**columns: list[object]) -> Callable[[Path], None]:
    return lambda path: pd.DataFrame(columns).to_parquet(path)


def nulls(path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.table({"text": pa.array([None, None], pa.string())}), path)


def corrupt(path: Path) -> None:
    """Write a table whose bytes, but not whose footer, are broken."""
    table(text=[f"{TEXT} {index}" for index in range(8)])(path)
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\xff" * 60 + data[160:])


DATA: dict[str, tuple[str, str | bytes | Callable[[Path], object] | None, str]] = {
    "no file": ("a.txt", None, "no data '"),
    "300 characters": ("x" * 300 + ".txt", None, "xxx.txt': expected"),
    "another kind": ("a.csv", ROW, "expected a .txt, .jsonl or .parquet file"),
    "a JSON list in a .json": ("a.json", "[]", "expected a .txt, .jsonl or .parquet file"),
    "empty text": ("a.txt", "", "a.txt is empty"),
    "a mark alone": ("a.txt", b"\xef\xbb\xbf", "a.txt is empty"),
    "blank text": ("a.txt", " \n", "a.txt is empty"),
    "UTF-16 text": ("a.txt", TEXT.encode("utf-16"), "is UTF-16 or UTF-32, expected UTF-8"),
    "binary text": ("a.txt", b"ab\x89PNG", "is not text: byte 2 is not UTF-8"),
    "NUL bytes": ("a.txt", b"abc\0", "is not text: it holds NUL bytes"),
    "a document of 11 MB": ("a.txt", "word " * 2_200_000, "a document of 11,000,000 characters"),
    "UTF-16 rows": ("a.jsonl", ROW.encode("utf-16"), "is UTF-16 or UTF-32, expected UTF-8"),
    "Latin-1 rows": ("a.jsonl", ROW.encode() + b'"\xe9"', "is not UTF-8"),
    "no rows": ("a.jsonl", "", "has no column 'text'; its columns: none"),
    "one JSON list": (
        "a.jsonl",
        f"[{ROW.strip()}]",
        "(line 1) is no valid jsonl file: expected an",
    ),
    "rows of lists": ("a.jsonl", lines(["text"]), "(line 1) is no valid jsonl file: expected an"),
    "rows of text": ("a.jsonl", lines("text"), "(line 1) is no valid jsonl file: expected an"),
    "rows of null": ("a.jsonl", lines(None), "(line 1) is no valid jsonl file: expected an object"),
    "a row cut short": ("a.jsonl", ROW + '{"text": "a', "(line 2) is no valid jsonl file: "),
    "a deep row": ("a.jsonl", f'{ROW}{{"text": {DEEP}', "(line 2) is no valid jsonl file: "),
    "another column": ("a.jsonl", lines({"body": "a"}), "no column 'text'; its columns: body"),
    "escapes": ("a.jsonl", lines({"\x1b[31m": "a"}), r"its columns: \x1b[31m"),
    "a row without": ("a.jsonl", ROW + lines({"a": 1}), "(line 2) has no column 'text'"),
    "a column twice": ("a.jsonl", '{"text": "a", "text": "b"}', "(line 1) has 2 columns 'text'"),
    "a null": (
        "a.jsonl",
        ROW + lines({"text": None}),
        "(line 2): the column 'text' holds something",
    ),
    "a number": ("a.jsonl", lines({"text": 7}), "the column 'text' holds something else than text"),
    "a list": ("a.jsonl", lines({"text": ["a"]}), "the column 'text' holds something else than"),
    "half a character": ("a.jsonl", '{"text": "\\ud800"}', "it holds half a surrogate pair"),
    "no table": ("a.parquet", "PAR1 and no more", "a.parquet is no valid parquet file: "),
    "an empty table": ("a.parquet", "", "a.parquet is no valid parquet file: "),
    "a corrupt table": ("a.parquet", corrupt, "a.parquet is no valid parquet file: "),
    "a table without": ("a.parquet", table(body=["a"]), "no column 'text'; its columns: body"),
    "a doubled column": ("a.parquet", doubled, "has 2 columns 'text', expected one"),
    "a null in a table": ("a.parquet", table(text=["a", None]), "than text in 1 of 2 rows"),
    "nulls in a table": ("a.parquet", nulls, "than text in 2 of 2 rows"),
    "numbers in a table": ("a.parquet", table(text=[1]), "something else than text (int64)"),
    "bytes in a table": ("a.parquet", table(text=[b"a"]), "something else than text (binary)"),
}


@pytest.mark.parametrize("row", DATA)
def test_broken_data_is_one_line(
    row: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content, says = DATA[row]
    path = tmp_path / name
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    line = refused(capfd, tmp_path / "here", scores, *SMALL, "--data", path)
    assert says in line
    assert name in line


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_data_set_with_a_deep_file_is_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text(f'{16 * ROW}{{"text": "a", "x": {DEEP}}}\n')
    line = refused(capfd, tmp_path / "here", scores, *SMALL, "--data", tmp_path / "texts")
    assert line == f"{tmp_path / 'texts' / name} holds JSON that is nested more than 1000 deep"


@pytest.mark.parametrize(
    "name",
    ["~nosuchuser/a.txt", "~nosuchuser/a.jsonl", "", " ", "a\0.txt", "\x1b[31m.txt", "[red].txt"],
)
def test_a_name_that_is_no_data_is_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refused(capfd, tmp_path, ablate, *SMALL, "--data", name)
    assert line.startswith(f"no data {name!r}: ")


@pytest.mark.parametrize("name", ["~nosuchuser/model", "x" * 300, "a\0b", "\x1b[31m", "[red]"])
def test_a_name_that_is_no_model_is_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refused(capfd, tmp_path, layers, "--model", name)
    assert "unknown model" in line


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_in_a_models_folder_is_not_opened(
    file: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(copytree(whole, tmp_path / "model"))
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    line = refused(capfd, tmp_path / "here", layers, "--model", folder)
    assert line == f"{folder / file} is a pipe, a socket or a device: only regular files are opened"


def test_a_device_among_the_texts_of_a_data_set_is_not_opened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").symlink_to("/dev/zero")
    line = refused(capfd, tmp_path / "here", scores, *SMALL, "--data", tmp_path / "texts")
    assert line.startswith(f"{tmp_path / 'texts' / 'a.jsonl'} is a pipe, a socket or a device")


def test_a_manifest_that_is_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(UserError, match="holds no run: its manifest cannot be read"):
        read_run(tmp_path)


ODD = {
    "checksums": [{"maps.safetensors": 7}, ["maps.safetensors"]],
    "conditions": [{}],
    "data": ["tokens"],
    "fold_sizes": [8],
    "kind": [["scores"]],
    "layer": ["first"],
    "model": ["llama"],
    "seconds": ["long"],
    "settings": [["seed"]],
    "skip_keys": ["a"],
    "sources": [["model"]],
    "threads": ["all"],
}


@pytest.mark.parametrize(("field", "value"), [(name, each) for name in ODD for each in ODD[name]])
def test_a_manifest_of_odd_types_is_one_line(
    field: str, value: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = {"kind": "simulate", "settings": {}, "checksums": {}, "complete": True}
    manifest |= {field: value}
    run = tmp_path / "here" / "run"
    for folder in (run, tmp_path / "here" / "other"):
        folder.mkdir(parents=True)
        written = {**manifest, "checksum": json_checksum(manifest)}
        (folder / "manifest.json").write_text(json.dumps(written))
    told = f"{run} holds no run: its manifest has {str(value)!r} as {field}; remove {run} and run "
    for command, others in ((compare, ["other"]), (reproduce, [])):
        assert refused(capfd, run.parent, command, run, *others).startswith(told)


BROKEN = {
    "empty": b"",
    "cut": b'{"settings": ',
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "deep": DEEP.encode(),
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_manifest_says_what_to_remove(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here" / "run"
    out.mkdir(parents=True)
    (out / "manifest.json").write_bytes(BROKEN[what])
    told = f"holds no run: its manifest cannot be read; remove {out} and run again"
    assert refused(capfd, out.parent, ablate, *SMALL, "--out", out) == f"{out} {told}"
    (tmp_path / "other").mkdir()
    assert refused(capfd, out.parent, compare, out, tmp_path / "other") == f"{out} {told}"


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_training_run_says_what_to_remove(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here" / "run"
    out.mkdir(parents=True)
    (out / "run.json").write_bytes(BROKEN[what])
    line = refused(capfd, out.parent, train, "--preset", "nope-tiny", "--resume", "--out", out)
    assert line == f"{out / 'run.json'} is broken; remove {out} and train again"
