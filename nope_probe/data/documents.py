"""Documents: the texts of a source on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.data.stdlib import SHIPPED, stdlib_documents
from nope_probe.errors import UserError
from nope_probe.files import local_path, reading, validate_regular

if TYPE_CHECKING:
    import pyarrow as pa

LARGE = 1 << 26  # bytes of a file that is read once only, when the model is there
MIN_FOLDS = 4  # of the data, that intervals are made from
SOURCES = ("shipped", "stdlib", "random", "gaussian")


def documents(source: str) -> list[str]:
    """Read the documents of a text source on this machine.

    Raises:
        UserError: for an unknown source, or a file that is empty, broken or has no text.
    """
    if source == "shipped":
        return read_texts(SHIPPED)
    if source == "stdlib":
        return stdlib_documents()
    path = local_path(source)
    validate_file(source, path)
    texts = [text for text in read_texts(path) if text.strip()]
    if not texts:
        raise UserError(f"{source} is empty")
    return texts


def validate_readable(source: str) -> None:
    """Check that a file on this machine can be read, if that takes less than seconds.

    Raises:
        UserError: as `documents` does.
    """
    path = local_path(source)
    if source not in SOURCES and not (os.path.isfile(path) and path.stat().st_size > LARGE):
        documents(source)


def file_of(source: str) -> Path | None:
    """Return the file, or the folder of a data set, that a source is read from; None if neither."""
    path = SHIPPED if source == "shipped" else local_path(source)
    return path if source and os.path.exists(path) and source not in SOURCES[1:] else None


def validate_file(source: str, path: Path) -> None:
    """Check that a source is a file of a known kind.

    Raises:
        UserError: listing the sources or kinds of files that there are.
    """
    validate_regular(path)
    if not os.path.isfile(path):  # False too for names that no file can have
        raise UserError(
            f"no data {source!r}: expected {', '.join(SOURCES)} or a file that exists, "
            "fineweb-edu, a Hub data set (owner/name) or a folder of one"
        )
    if path.suffix not in SUFFIXES:
        raise UserError(f"cannot read {source}: expected a .txt, .jsonl or .parquet file")


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
    """Check that there are documents for every fold: the sequences of one are not independent.

    Raises:
        UserError: saying how many there are.
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
            f"share one: lower --folds to {n_documents}, or take more documents"
        )


SUFFIXES = (".txt", ".jsonl", ".parquet")
# A tokenizer keeps some 150 bytes for each character of a document while it is at work on it.
MOST_CHARACTERS = 10_000_000
_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: the whole of a .txt, the column `text` of the others.

    Raises:
        UserError: naming the file, the line where there is one, and what is wrong.
    """
    try:
        texts = {".txt": _text, ".jsonl": _json_rows, ".parquet": _column}[path.suffix](path)
        return list(_checked(path, texts))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def validate_text_column(source: str | Path, columns: Iterable[object]) -> None:
    """Check that a table has one column `text`.

    Raises:
        UserError: listing its columns.
    """
    names = [str(column) for column in columns]
    if "text" not in names:
        raise UserError(f"{source} has no column 'text'; its columns: {', '.join(names) or 'none'}")
    if names.count("text") > 1:
        raise UserError(f"{source} has {names.count('text')} columns 'text', expected one")


def validate_texts(source: str | Path, texts: Iterable[object]) -> None:
    """Check that every value of the column `text` is text.

    Raises:
        UserError: naming the source.
    """
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{source}: the column 'text' holds something else than text")


def validate_text(source: str | Path, text: str) -> None:
    """Check that a document is text that a tokenizer takes.

    Raises:
        UserError: for NUL bytes, half a surrogate pair, or a document beyond 10 million characters.
    """
    if "\0" in text:
        raise UserError(f"{source} is not text: it holds NUL bytes")
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{source} holds a document of {len(text):,} characters, more than "
            f"{MOST_CHARACTERS:,}: split it into rows of a .jsonl or .parquet file"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{source} is not text: it holds half a surrogate pair") from error


def _checked(path: Path, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        validate_text(path, text)
        yield text


def _text(path: Path) -> list[str]:
    return ["".join(_lines(path))]


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without a byte order mark."""
    begin = 0
    with path.open("rb") as file:
        for line in file:
            if begin == 0 and line.startswith(_OTHER_MARKS):
                raise UserError(f"{path} is UTF-16 or UTF-32, expected UTF-8: convert it")
            try:
                yield line.removeprefix(b"" if begin else _MARK).decode()
            except UnicodeDecodeError as error:
                at = begin + error.start
                raise UserError(f"{path} is not text: byte {at} is not UTF-8") from error
            begin += len(line)


def _json_rows(path: Path) -> Iterator[str]:
    number = 0
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield _json_row(path, number, line)
    if number == 0:
        validate_text_column(path, ())


def _json_row(path: Path, number: int, line: str) -> str:
    where = f"{path} (line {number})"
    with reading(f"{where} is no valid jsonl file"):
        # As tuples of pairs, objects are told from arrays, and a name that comes twice is seen.
        row = json.loads(line, object_pairs_hook=tuple)
    if not isinstance(row, tuple):
        raise UserError(f"{where} is no valid jsonl file: expected an object with a text a line")
    validate_text_column(where, (name for name, _ in row))
    (text,) = (value for name, value in row if name == "text")
    validate_texts(where, [text])
    return text


def _column(path: Path) -> list[str]:
    from pyarrow.parquet import ParquetFile

    with reading(f"{path} is no valid parquet file"):
        with ParquetFile(path) as file:
            validate_text_column(path, file.schema_arrow.names)
            column = file.read(columns=["text"])["text"]
        validate_string_column(path, column)
        return column.to_pylist()


def validate_string_column(path: Path, column: pa.ChunkedArray) -> None:
    """Check that every value of a column is text.

    Raises:
        UserError: saying what it holds instead.
    """
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        what = f"something else than text ({column.type})"
    elif column.null_count:
        what = f"something else than text in {column.null_count} of {len(column)} rows"
    else:
        return
    raise UserError(f"{path}: the column 'text' holds {what}")
