"""Documents: the texts of a source, in files on this machine or in data sets that are streamed.

A data set is on the Hub or in a folder, and only the part that is needed is read. Python's standard
library is text that every machine has. A hash of a module's name decides whether it is for training
or held out. The held-out text is shipped with the checkpoints, because the library differs between
Python versions.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from nope_probe.errors import UserError, kind_of, validate_unicode
from nope_probe.files import (
    local_path,
    reading,
    validate_nesting,
    validate_regular,
    validate_regular_files,
)
from nope_probe.maps import MIN_FOLDS

SOURCES = ("shipped", "stdlib", "prose", "random", "gaussian")
SUFFIXES = (".txt", ".jsonl", ".parquet")
LARGE = 1 << 26  # bytes of a file that is read only once, after the model is loaded
# A tokenizer takes some 150 bytes for each character of the document that it works on.
MOST_CHARACTERS = 10_000_000
# Models are trained on this data set, so only its held-out slice is read.
HELD_OUT = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}
_SAVED = ("state.json", "dataset_dict.json")  # in a folder of `save_to_disk`
BYTE_ORDER_MARK = "\ufeff"
SHIPPED = Path(__file__).parents[1] / "checkpoints" / "heldout.jsonl"
HELD_OUT_PERCENT = 13
_SKIPPED = {
    *("test", "tests", "idle_test", "encodings", "idlelib", "lib2to3", "tkinter", "distutils"),
    *("site-packages", "dist-packages", "__pycache__", "turtledemo", "pydoc_data"),
}
_MIN_CHARACTERS = 1200


def documents(source: str) -> list[str]:
    """Read the documents of a text source on this machine.

    Raises:
        UserError: for an unknown source, or a file that is empty, broken or has no text.
    """
    shipped = {"stdlib": stdlib_documents, "prose": prose_documents}
    if source in shipped:
        return shipped[source]()
    path = SHIPPED if source == "shipped" else local_path(source)
    validate_regular(path)
    if not os.path.isfile(path):  # False for names that no file can have
        raise UserError(
            f"no data {source!r}: expected {', '.join(SOURCES)} or a file that exists, "
            "fineweb-edu, a Hub data set (owner/name) or a folder of one"
        )
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"cannot read {source}: expected a .txt, .jsonl or .parquet file, or the folder of a "
            "data set, whose files may be .csv or .gz too"
        )
    texts = [text for text in read_texts(path) if text.removeprefix(BYTE_ORDER_MARK).strip()]
    if not texts:
        raise UserError(f"{source} is empty")
    return texts


def validate_readable(source: str) -> None:
    """Check that a file on this machine can be read, unless it is large.

    Raises:
        UserError: as `documents` does.
    """
    path = local_path(source)
    if source not in SOURCES and not (os.path.isfile(path) and path.stat().st_size > LARGE):
        documents(source)


def validate_token_file(path: Path) -> None:
    """Check that there is a file of token ids, by its name.

    Raises:
        UserError: for a file of another kind, or none.
    """
    if path.suffix.lower() not in (".npy", ".safetensors"):
        raise UserError(
            f"--tokens {path.name}: expected a .npy or .safetensors file; files with pickled "
            "objects (.pt) are refused"
        )
    validate_regular(path)
    if not os.path.isfile(path):
        raise UserError(f"--tokens {path}: there is no such file")


def file_of(source: str) -> Path | None:
    """Return a source's file, or the folder of a data set; None if it has neither."""
    path = SHIPPED if source == "shipped" else local_path(source)
    return path if source and os.path.exists(path) and source not in SOURCES[1:] else None


def validate_packing(source: str, start: str) -> None:
    """Check that a source has documents to pack, and that sequences may begin anywhere.

    Raises:
        UserError: naming the flags.
    """
    if source in ("random", "gaussian"):
        raise UserError(f"--pack joins documents, and --data {source} has none")
    if start == "start":
        raise UserError(
            "--pack begins sequences anywhere, --windows start where documents begin: take one"
        )


def validate_folds(source: str, n_documents: int, folds: int) -> None:
    """Check that there are documents for every fold: a document's sequences are not independent.

    Raises:
        UserError: naming the number of documents.
    """
    if n_documents < MIN_FOLDS:
        raise UserError(
            f"intervals need sequences of {MIN_FOLDS} documents or more, and --data {source} gives "
            f"{n_documents} (a .txt file is one): take a .jsonl or .parquet file with a text in "
            "each row"
        )
    if n_documents < folds:
        raise UserError(
            f"{n_documents} documents do not fill {folds} folds, since the sequences of a document "
            f"share a fold: lower --folds to {n_documents}, or take more documents"
        )


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: the whole of a .txt file, the column `text` of other files.

    Raises:
        UserError: naming the file, the line if the file has lines, and the error.
    """
    with reading(f"cannot read {path}"):
        if path.suffix == ".txt":
            text = "".join(line for _, line in _lines(path))
            validate_text(path, text)
            return [text]
        return list(_json_rows(path) if path.suffix == ".jsonl" else _column(path))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a file in UTF-8, after its place for errors."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path} (line {number})"
            try:
                yield where, line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} is not UTF-8 ({error.reason}): convert the file to UTF-8"
                ) from error


def _json_rows(path: Path) -> Iterator[str]:
    for number, (where, line) in enumerate(_lines(path)):
        line = line if number else line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            with reading(f"{where} is no valid jsonl file"):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise UserError(f"{where} is no valid jsonl file: it is no JSON object")
            yield text_of(where, row)


def _column(path: Path) -> Iterator[str]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        validate_text_column(path, file.schema_arrow.names)
        for number, cell in enumerate(file.read(columns=["text"])["text"], 1):
            where = f"{path} (row {number})"
            with reading(f"cannot read {where}"):
                text = cell.as_py()
            validate_text(where, text)
            yield text


def validate_text_column(source: str | Path, columns: Iterable[object]) -> None:
    """Check that a table has a column `text`.

    Raises:
        UserError: listing its columns.
    """
    names = [str(column) for column in columns]
    if "text" not in names:
        raise UserError(f"{source} has no column 'text'; its columns: {', '.join(names) or 'none'}")


def validate_text(source: str | Path, text: object) -> None:
    """Check that a document is Unicode text, of no more than 10 million characters.

    Raises:
        UserError: naming the source.
    """
    if not isinstance(text, str):
        raise UserError(f"{source}: expected a text, got {kind_of(text)}")
    if "\0" in text:
        raise UserError(f"{source} is not text: it holds NUL bytes")
    validate_unicode(source, text)
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{source} holds a document of {len(text):,} characters, more than "
            f"{MOST_CHARACTERS:,}: split it into rows of a .jsonl or .parquet file"
        )


def text_of(where: str, row: Any) -> str:
    """Return a text, or the column `text` of a row.

    Raises:
        UserError: naming where it is, for a row without that column or what is no text.
    """
    if isinstance(row, Mapping):
        validate_text_column(where, row)
        row = row["text"]
    validate_text(where, row)
    return row


def is_data_set(source: str) -> bool:
    """Return whether a source is a data set (fineweb-edu, a Hub id, a folder), not a file."""
    path = local_path(source)
    if source in SOURCES:  # whatever is here by that name
        return False
    if source.lower() in HELD_OUT or (source and os.path.isdir(path)):
        return True
    like_an_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return like_an_id and path.suffix not in SUFFIXES and not os.path.isfile(path)


def stream_texts(source: str) -> Iterator[str]:
    """Stream the texts of a data set in their order; from fineweb-edu, the held-out slice.

    Args:
        source: `fineweb-edu`, a Hub id (`owner/name` or `owner/name:config`) or a local folder.

    Raises:
        UserError: for a data set that cannot be read or has no column of texts.
    """
    held_out_only = source.lower() in HELD_OUT
    if held_out_only:
        name, config = HELD_OUT[source.lower()]
    elif os.path.isdir(local_path(source)):
        name, config = str(local_path(source)), ""
    else:
        name, _, config = source.partition(":")
    with _quiet(), reading(f"cannot read the data set {source}"):
        for number, row in enumerate(_split_of(_data_set(name, config)), 1):
            text = text_of(f"{source} (row {number})", row)
            if text.strip() and (not held_out_only or is_held_out(text)):
                yield text


def _data_set(name: str, config: str) -> Any:
    """Open a data set, on the Hub or in a folder: its rows, or its splits.

    A .txt file is a row, and all those of a folder are, also where a name looks like a split's.
    """
    from datasets import load_dataset_builder, load_from_disk
    from datasets.packaged_modules.text.text import Text

    folder = Path(name) if os.path.isdir(name) else None
    if folder is not None:
        validate_regular_files(folder)
        validate_nesting(folder)
        if any((folder / file).is_file() for file in _SAVED):
            return load_from_disk(name)
    builder = load_dataset_builder(name, config or None, data_files="**" if folder else None)
    if not isinstance(builder, Text):
        builder = load_dataset_builder(name) if folder else builder
        return builder.as_streaming_dataset()
    builder.config.sample_by = "document"
    if folder is not None:
        files = [file for of_split in builder.config.data_files.values() for file in of_split]
        builder.config.data_files = {"train": [f for f in files if ".txt" in Path(f).name.lower()]}
    return builder.as_streaming_dataset()


def column_of(given: Any) -> Iterable[object]:
    """Return the texts, or the rows with texts, in what Python holds.

    Args:
        given: a list, a pandas column, an array or rows; a table, whose column `text` is taken; a
            data set, of whose splits `train` or the first is taken.

    Raises:
        UserError: for a table without that column, or what holds no texts.

    Example:
        >>> column_of({"id": [1, 2], "text": ["one", "two"]})
        ['one', 'two']
    """
    given = _split_of(given)
    if hasattr(given, "to_pylist"):  # pyarrow's
        given = given.to_pylist()
    columns = given if isinstance(given, Mapping) else getattr(given, "columns", None)
    if columns is not None:
        validate_text_column("the table", columns)
        given = given["text"]
    is_single = isinstance(given, str | bytes) or getattr(given, "shape", None) == ()
    if is_single or not isinstance(given, Iterable):
        raise UserError(f"expected a source of text or a list of texts, got {kind_of(given)}")
    return given


def _split_of(given: Any) -> Any:
    """Return the split `train` of a data set, or its first; what has no splits, as it is."""
    splits = [*given.values()] if isinstance(given, Mapping) else []
    if not splits or not all(hasattr(split, "column_names") for split in splits):
        return given
    return given.get("train", splits[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the log of `datasets`, which repeats the error that it raises."""
    from datasets.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def stdlib_documents(held_out: bool | None = None) -> list[str]:
    """Return the documents of this Python's standard library.

    Args:
        held_out: True for held-out modules, False for training modules, None for all modules.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    return [
        document
        for name, path in modules.items()
        if not _SKIPPED & {*name.parts} and not name.parts[0].startswith("config-")
        if held_out in (None, is_held_out(name.as_posix()))
        for document in split(path.read_text(encoding="utf-8", errors="ignore"))
    ]


def prose_documents() -> list[str]:
    """Return the chapters of the language reference that every Python ships, in English prose."""
    from pydoc_data.topics import topics

    return list(dict.fromkeys(topics[name] for name in sorted(topics)))


def prose_note() -> str:
    """Return which text `prose` is on this machine: it differs between versions of Python."""
    text = "".join(prose_documents())
    return (
        f"The prose is the language reference of Python {platform.python_version()}, "
        f"{len(text):,} characters, SHA-256 {sha256(text.encode()).hexdigest()[:16]}."
    )


def split(source: str) -> list[str]:
    """Split a module's source before top-level statements into documents of 1,200 characters.

    The last document may be shorter. A source in another Python's syntax stays whole.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return [source]
    lines = source.splitlines(keepends=True)
    firsts = [[node, *getattr(node, "decorator_list", [])] for node in statements[1:]]
    starts = [min(part.lineno for part in parts) - 1 for parts in firsts]
    documents, begin = [], 0
    for start in [*starts, len(lines)]:
        text = "".join(lines[begin:start])
        if len(text) >= _MIN_CHARACTERS or start == len(lines):
            documents.append(text)
            begin = start
    return [document for document in documents if document.strip()]


def is_held_out(key: str) -> bool:
    """Return whether a text (or the name of a module) belongs to the held-out slice."""
    return int(sha256(key.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT
