"""Data sets of documents, on the Hub or in a folder, streamed no further than is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.data.documents import SUFFIXES, validate_text_column, validate_texts
from nope_probe.data.held_out import is_held_out
from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a data set that models are trained on, only the held-out slice is read.
HELD_OUT = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}
MOST_DOCUMENTS = 1_000_000
_BATCH = 64


def is_data_set(source: str) -> bool:
    """Return whether a source is a data set (fineweb-edu, a Hub id, a folder), not a file."""
    path = Path(source).expanduser()
    if source.lower() in HELD_OUT or path.is_dir():
        return True
    like_an_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return like_an_id and path.suffix not in SUFFIXES and not path.is_file()


def stream_texts(source: str) -> Iterator[str]:
    """Stream the texts of a data set, in its own order; of fineweb-edu the held-out slice.

    Args:
        source: `fineweb-edu`, a Hub id (`owner/name` or `owner/name:config`) or a local folder.

    Raises:
        UserError: if it cannot be read or has no column of texts.
    """
    from datasets import load_dataset

    held_out_only = source.lower() in HELD_OUT
    name, config = HELD_OUT.get(source.lower(), _name_and_config(source))
    with _as_user_errors(source):
        splits = load_dataset(name, config or None, streaming=True)
        for row in splits["train" if "train" in splits else next(iter(splits))]:
            validate_text_column(source, row)
            validate_texts(source, [row["text"]])
            if row["text"].strip() and (not held_out_only or is_held_out(row["text"])):
                yield row["text"]


def long_documents(
    source: str, tokenizer: PreTrainedTokenizerBase, n_documents: int, n_tokens: int
) -> list[list[int]]:
    """Return the tokens of a data set's first n_documents documents of n_tokens tokens or more.

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
    """Return the tokens of a data set's first documents: n_tokens in all, with a separator each.

    If the data set has fewer, all of its documents are returned.
    """
    found, n_read = list[list[int]](), 0
    for document in _tokenised(source, tokenizer):
        found.append(document)
        n_read += len(document) + 1
        if n_read >= n_tokens:
            break
    return found


def _name_and_config(source: str) -> tuple[str, str]:
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path), ""
    name, _, config = source.partition(":")
    return name, config


def _tokenised(source: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    texts = islice(stream_texts(source), MOST_DOCUMENTS)
    while batch := list(islice(texts, _BATCH)):
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]


@contextmanager
def _as_user_errors(source: str) -> Iterator[None]:
    """Raise a UserError of one line for what `datasets` raises."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the data set {source}: {reason}") from error
