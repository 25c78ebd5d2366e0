"""Data sets of documents, on the Hub or in a folder, streamed no further than is needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.data.documents import (
    SUFFIXES,
    validate_text,
    validate_text_column,
    validate_texts,
)
from nope_probe.data.stdlib import is_held_out
from nope_probe.errors import UserError, stderr_held
from nope_probe.files import local_path, reading, validate_nesting, validate_regular_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a data set that models are trained on, only the held-out slice is read.
HELD_OUT = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}
MOST_DOCUMENTS = 1_000_000
_BATCH = 64


def is_data_set(source: str) -> bool:
    """Return whether a source is a data set (fineweb-edu, a Hub id, a folder), not a file."""
    path = local_path(source)
    if source.lower() in HELD_OUT or (source and os.path.isdir(path)):
        return True
    like_an_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    return like_an_id and path.suffix not in SUFFIXES and not os.path.isfile(path)


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
    with _quiet(), reading(f"cannot read the data set {source}"):
        if os.path.isdir(name):
            validate_regular_files(Path(name))
            validate_nesting(Path(name))
        splits = load_dataset(name, config or None, streaming=True)
        for row in splits["train" if "train" in splits else next(iter(splits))]:
            validate_text_column(source, row)
            validate_texts(source, [row["text"]])
            validate_text(source, row["text"])
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
    for document in tokenised(islice(stream_texts(source), MOST_DOCUMENTS), tokenizer):
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
    for document in tokenised(islice(stream_texts(source), MOST_DOCUMENTS), tokenizer):
        found.append(document)
        n_read += len(document) + 1
        if n_read >= n_tokens:
            break
    return found


def _name_and_config(source: str) -> tuple[str, str]:
    path = local_path(source)
    if os.path.isdir(path):
        return str(path), ""
    name, _, config = source.partition(":")
    return name, config


def tokenised(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the tokens of each text; a batch at a time, since tokenizers keep far more than ids.

    Raises:
        UserError: for a text that the tokenizer has no tokens for.
    """
    remaining = iter(texts)
    while batch := list(islice(remaining, _BATCH)):
        yield from _tokens(batch, tokenizer)


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    failure = f"the tokenizer of {tokenizer.name_or_path} cannot take the text"
    with reading(failure), stderr_held():
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


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
