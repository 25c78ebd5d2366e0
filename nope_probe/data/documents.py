"""Documents: the texts of a source on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.data.stdlib import SHIPPED, stdlib_documents
from nope_probe.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

SOURCES = ("shipped", "stdlib", "random", "gaussian")
SUFFIXES = (".txt", ".jsonl", ".parquet")


def documents(source: str) -> list[str]:
    """Read the documents of a text source on this machine.

    Raises:
        UserError: for an unknown source, or a file that is empty, binary or has no text.
    """
    if source == "shipped":
        return _column(SHIPPED)
    if source == "stdlib":
        return stdlib_documents()
    path = Path(source).expanduser()
    validate_file(source, path)
    try:
        texts = [path.read_text(encoding="utf-8")] if path.suffix == ".txt" else _column(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not text: byte {error.start} is not UTF-8") from error
    if any("\0" in text for text in texts):
        raise UserError(f"{source} is not text: it holds NUL bytes")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"{source} is empty")
    return texts


def file_of(source: str) -> Path | None:
    """Return the file, or the folder of a data set, that a source is read from; None if neither."""
    path = SHIPPED if source == "shipped" else Path(source).expanduser()
    return path if path.exists() and source not in SOURCES[1:] else None


def validate_file(source: str, path: Path) -> None:
    """Check that a source is a file of a known kind.

    Raises:
        UserError: listing the sources or kinds of files that there are.
    """
    if not path.is_file():
        raise UserError(
            f"no data {source!r}: expected {', '.join(SOURCES)} or a file that exists, "
            "fineweb-edu, a Hub data set (owner/name) or a folder of one"
        )
    if path.suffix not in SUFFIXES:
        raise UserError(f"cannot read {source}: expected a .txt, .jsonl or .parquet file")


def validate_text_column(source: str | Path, columns: Iterable[object]) -> None:
    """Check that a table has a column `text`.

    Raises:
        UserError: listing its columns.
    """
    names = [str(column) for column in columns]
    if "text" not in names:
        raise UserError(f"{source} has no column 'text'; its columns: {', '.join(names) or 'none'}")


def validate_texts(source: str | Path, texts: Iterable[object]) -> None:
    """Check that every value of the column `text` is text.

    Raises:
        UserError: naming the source.
    """
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{source}: the column 'text' holds something else than text")


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


def _column(path: Path) -> list[str]:
    import pandas as pd
    from pyarrow import ArrowInvalid

    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
        else:
            table = pd.read_json(path, lines=True, dtype=False)
    except (ValueError, ArrowInvalid) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise UserError(f"{path} is no valid {path.suffix[1:]} file: {error}") from error
    return _texts(path, table)


def _texts(path: Path, table: pd.DataFrame) -> list[str]:
    validate_text_column(path, table.columns)
    validate_texts(path, table["text"])
    return table["text"].tolist()
