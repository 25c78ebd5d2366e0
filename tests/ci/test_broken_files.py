"""Broken files of models, of data and of runs: one line that names the file and the cause.

Each row of a table is something broken and a part of the line that has to say so. Every one ends
with exit code 2, one line on stderr, nothing on stdout, and nothing left behind.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file
from support.command_line import refused
from support.tiny_models import change, write_llama

from nope_probe import ablate

Break = Callable[[Path], object]
DEEP = "[" * 100_000
WEIGHTS = "model.safetensors"
SMALL = ["--layers", 1, "--n-seqs", 16, "--seq-len", 16, "--folds", 4]
TEXT = "in the other one there is more than that " * 20
ROW = json.dumps({"text": TEXT}) + "\n"


def put(name: str, content: str) -> Break:
    """Put other content into a file."""
    return lambda folder: (folder / name).write_text(content)


def tensors(edit: Callable[[dict[str, Any]], object]) -> Break:
    """Edit the tensors."""

    def apply(folder: Path) -> None:
        result = load_file(folder / WEIGHTS)
        edit(result)
        save_file(result, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def break_index(folder: Path) -> None:
    """Replace the weights by an index that is no JSON."""
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(DEEP)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


# What a library says of a file follows after the part; the words are not ours to test.
ROWS: dict[str, tuple[Break, str]] = {
    "config of a list": (put("config.json", "[]"), "config.json: "),
    "config with an unknown type": (partial(change, model_type="\x1b[31mred"), r"\x1b[31mred"),
    "config with an unknown activation": (partial(change, hidden_act="swoosh"), "(KeyError)"),
    "a layer too many": (
        partial(change, num_hidden_layers=3),
        "lacks weights, such as model.layers.2.",
    ),
    "an encoder": (
        partial(change, model_type="bert", architectures=["BertForMaskedLM"]),
        "is a BertForMaskedLM, not a causal decoder",
    ),
    "tokenizer of no JSON": (put("tokenizer.json", DEEP), "tokenizer: "),
    "weights cut": (cut, "model.safetensors is a broken safetensors file: "),
    "weights without a norm": (
        tensors(lambda result: result.pop("model.norm.weight")),
        "lacks weights, such as model.norm.weight",
    ),
    "weights of another shape": (
        tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:41].clone()})),
        "has weights of other shapes than its config.json has, such as model.norm.weight",
    ),
    "index of no JSON": (break_index, "is no valid index of safetensors files: "),
    "quantised weights": (
        partial(change, quantization_config={"quant_method": "own"}),
        "is quantised (own), and its weights cannot be read as plain numbers",
    ),
}


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
    line = refused(capfd, tmp_path / "here", ablate, "--data", "random", "--model", folder)
    assert says in line
    assert str(folder) in line
    assert len(line) < 300 + 2 * len(str(folder)) + 100


def table(**columns: list[object]) -> Callable[[Path], None]:
    return lambda path: pd.DataFrame(columns).to_parquet(path)


def corrupt(path: Path) -> None:
    """Write a table whose bytes, but not whose footer, are broken."""
    table(text=[f"{TEXT} {index}" for index in range(8)])(path)
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\xff" * 60 + data[160:])


# What a library says of a file follows after the colon; the words are not ours to test.
DATA: dict[str, tuple[str, str | bytes | Callable[[Path], object], str]] = {
    "another kind": ("a.csv", ROW, "expected a .txt, .jsonl or .parquet file, or the folder of"),
    "NUL bytes": ("a.txt", b"abc\0", "is not text: it holds NUL bytes"),
    "one JSON list": ("a.jsonl", f"[{ROW.strip()}]", "(line 1) is no valid jsonl file: it is no"),
    "a row cut short": ("a.jsonl", ROW + '{"text": "a', "(line 2) is no valid jsonl file: "),
    "a deep row": ("a.jsonl", f'{ROW}{{"text": {DEEP}', "(line 2) is no valid jsonl file: "),
    "another column": ("a.jsonl", '{"\\u001b": "a"}', r"(line 1) has no column 'text'; its c"),
    "a null": ("a.jsonl", ROW + '{"text": null}', "(line 2): expected a text, got None"),
    "no table": ("a.parquet", "PAR1 and no more", "cannot read "),
    "a corrupt table": ("a.parquet", corrupt, "cannot read "),
}


@pytest.mark.parametrize("row", DATA)
def test_broken_data_is_one_line(
    row: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content, says = DATA[row]
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    line = refused(capfd, tmp_path / "here", ablate, *SMALL, "--data", path)
    assert says in line
    assert name in line


def test_a_data_set_with_a_deep_file_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text(f'{16 * ROW}{{"text": "a", "x": {DEEP}}}\n')
    line = refused(capfd, tmp_path / "here", ablate, *SMALL, "--data", tmp_path / "texts")
    assert line.startswith(f"cannot read {tmp_path / 'texts' / 'a.jsonl'}: ")


@pytest.mark.parametrize(
    ("flag", "told"), [("--data", "no data {!r}: "), ("--model", "unknown model {!r}; ")]
)
@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b", "\x1b[31m"])
def test_a_name_of_nothing_is_one_line(
    flag: str, told: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refused(capfd, tmp_path, ablate, *SMALL, flag, name)
    assert line.startswith(told.format(name))


def test_a_pipe_or_a_device_in_a_folder_is_not_opened(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(copytree(whole, tmp_path / "model"))
    os.mkfifo(folder / "pipe.json")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").symlink_to("/dev/zero")
    told = "is a pipe, a socket or a device: only regular files are opened"
    line = refused(capfd, tmp_path / "here", ablate, "--data", "random", "--model", folder)
    assert line == f"{folder / 'pipe.json'} {told}"
    line = refused(capfd, tmp_path / "here", ablate, *SMALL, "--data", tmp_path / "texts")
    assert line == f"{tmp_path / 'texts' / 'a.jsonl'} {told}"
