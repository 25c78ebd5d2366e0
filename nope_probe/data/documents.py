"""Documents: the texts of a source, from this machine or streamed from a data set on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.data.stdlib import SHIPPED, stdlib_documents
from nope_probe.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerBase


SOURCES = ("shipped", "stdlib", "random", "gaussian")
SUFFIXES = (".txt", ".jsonl", ".parquet")
# Of a data set to train on only a slice by document hash is read, which training can leave out.
HELD_OUT = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}
HELD_OUT_PERCENT = 13
MOST_DOCUMENTS = 1_000_000
_BATCH = 64


def documents(source: str) -> list[str]:
    """Read the documents of a text source on this machine.

    Raises:
        UserError: for a source that does not exist or a file that is empty, binary or has no text.
    """
    if source == "shipped":
        return _column(SHIPPED)
    if source == "stdlib":
        return stdlib_documents()
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(
            f"no data {source!r}: expected {', '.join(SOURCES)} or a file that exists, "
            "fineweb-edu, a Hub data set (owner/name) or a folder of one"
        )
    if path.suffix not in SUFFIXES:
        raise UserError(f"cannot read {source}: expected a .txt, .jsonl or .parquet file")
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
    if "text" not in table:
        columns = ", ".join(map(str, table.columns)) or "none"
        raise UserError(f"{path} has no column 'text'; its columns: {columns}")
    if not all(isinstance(text, str) for text in table["text"]):
        raise UserError(f"{path}: the column 'text' holds something else than text")
    return table["text"].tolist()


def validate_packing(source: str, place: str) -> None:
    """Refuse to pack what has no documents, or windows that are to begin where these begin.

    Raises:
        UserError: naming the flags.
    """
    if source in ("random", "gaussian"):
        raise UserError(f"--pack joins documents, and --data {source} has none")
    if place == "start":
        raise UserError(
            "--pack cuts windows anywhere and --windows start where documents begin: take one"
        )


def is_data_set(source: str) -> bool:
    """Tell a data set (fineweb-edu, a Hub id, a local folder of files) from a file."""
    path = Path(source).expanduser()
    if source.lower() in HELD_OUT or path.is_dir():
        return True
    like_an_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return like_an_id and path.suffix not in SUFFIXES and not path.is_file()


def stream(source: str) -> Iterator[str]:
    """Stream the texts of a data set, in its own order; of fineweb-edu a held-out slice.

    Args:
        source: `fineweb-edu`, a Hub id (`owner/name` or `owner/name:config`) or a local folder.

    Raises:
        UserError: if it cannot be had or has no column of texts.
    """
    from datasets import load_dataset

    held_out = source.lower() in HELD_OUT
    name, config = HELD_OUT.get(source.lower(), _name_and_config(source))
    with _one_line(source):
        splits = load_dataset(name, config or None, streaming=True)
        for row in splits["train" if "train" in splits else next(iter(splits))]:
            text = _text(source, row)
            if text.strip() and (not held_out or is_held_out(text)):
                yield text


def _name_and_config(source: str) -> tuple[str, str]:
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path), ""
    name, _, config = source.partition(":")
    return name, config


def _text(source: str, row: dict[str, Any]) -> str:
    if "text" not in row:
        raise UserError(f"{source} has no column 'text'; its columns: {', '.join(row)}")
    if not isinstance(row["text"], str):
        raise UserError(f"{source}: the column 'text' holds something else than text")
    return row["text"]


def is_held_out(text: str) -> bool:
    """Tell by its hash whether a document belongs to the slice that is read."""
    return int(sha256(text.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def long_documents(
    source: str, tokenizer: PreTrainedTokenizerBase, n_documents: int, n_tokens: int
) -> list[list[int]]:
    """Read a data set up to its first n_documents documents of n_tokens tokens or more.

    Raises:
        UserError: if there are fewer (it says how many), or the data set cannot be read.
    """
    found, n_read = list[list[int]](), 0
    for document in _tokenised(source, tokenizer):
        n_read += 1
        if len(document) >= n_tokens:
            found.append(document)
        if len(found) == n_documents:
            return found
    raise UserError(
        f"{len(found)} of the {n_read} documents read from {source} have {n_tokens} tokens or "
        f"more, {n_documents} were asked for; lower --n-seqs or --seq-len"
    )


def first_documents(
    source: str, tokenizer: PreTrainedTokenizerBase, n_tokens: int
) -> list[list[int]]:
    """Read a data set up to n_tokens tokens, one more for each document, or to its end."""
    found, n_read = list[list[int]](), 0
    for document in _tokenised(source, tokenizer):
        found.append(document)
        n_read += len(document) + 1
        if n_read >= n_tokens:
            break
    return found


def _tokenised(source: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    texts = islice(stream(source), MOST_DOCUMENTS)
    while batch := list(islice(texts, _BATCH)):
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


@contextmanager
def _one_line(source: str) -> Iterator[None]:
    """Turn what `datasets` raises for a data set that cannot be had into one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the data set {source}: {reason}") from error
