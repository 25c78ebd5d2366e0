"""Documents: the texts of a source on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from nope_probe.data.stdlib import SHIPPED, stdlib_documents
from nope_probe.data.text_files import SUFFIXES, read_texts
from nope_probe.errors import UserError
from nope_probe.files import local_path, validate_regular

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
