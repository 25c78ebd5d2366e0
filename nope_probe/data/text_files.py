"""Read the texts of a .txt, .jsonl or .parquet file; what is wrong with one is a line that says so.

Files are UTF-8; a byte order mark at the start is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

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
    try:
        # As tuples of pairs, objects are told from arrays, and a name that comes twice is seen.
        row = json.loads(line, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no valid jsonl file: {error}") from error
    if not isinstance(row, tuple):
        raise UserError(f"{where} is no valid jsonl file: expected an object with a text a line")
    validate_text_column(where, (name for name, _ in row))
    (text,) = (value for name, value in row if name == "text")
    validate_texts(where, [text])
    return text


def _column(path: Path) -> list[str]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            validate_text_column(path, file.schema_arrow.names)
            column = file.read(columns=["text"])["text"]
        validate_string_column(path, column)
        return column.to_pylist()
    except (ArrowException, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is no valid parquet file: {reason}") from error


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
