"""Cut documents into token sequences of equal length, at random places or at their start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Sequences cut out of documents.

    Attributes:
        tokens: their tokens.
        documents: the number of the document that each is from. Sequences of one document are not
            independent.
    """

    tokens: Int[Tensor, "seq pos"]
    documents: Int[Tensor, " seq"]


def cut(ids: list[list[int]], n_seqs: int, length: int, generator: Generator) -> Windows:
    """Cut sequences that do not overlap at random places, taking documents in turn.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        generator: of every random choice.

    Raises:
        UserError: if there are too few (it says how many there are).
    """
    per_document = [_starts(len(document), length, generator) for document in ids]
    long_enough = [index for index, starts in enumerate(per_document) if starts]
    if not long_enough:
        raise UserError(
            f"every document is too short: the longest has {max(map(len, ids))} tokens, {length} "
            "are needed; lower --seq-len"
        )
    order = [long_enough[i] for i in torch.randperm(len(long_enough), generator=generator).tolist()]
    rounds = zip_longest(*([(index, start) for start in per_document[index]] for index in order))
    chosen = [place for turn in rounds for place in turn if place is not None]
    if len(chosen) < n_seqs:
        raise UserError(
            f"{len(long_enough)} documents of {length} tokens or more give {len(chosen)} "
            f"sequences, {n_seqs} were asked for; lower --n-seqs or --seq-len"
        )
    chosen = chosen[:n_seqs]
    return Windows(
        tokens=torch.tensor([ids[index][start : start + length] for index, start in chosen]),
        documents=torch.tensor([index for index, _ in chosen]),
    )


def cut_at_start(ids: list[list[int]], n_seqs: int, length: int, generator: Generator) -> Windows:
    """Take the first tokens of documents that are long enough, one sequence each, in random order.

    Raises:
        UserError: if there are too few (it says how many there are).
    """
    long_enough = [document[:length] for document in ids if len(document) >= length]
    if len(long_enough) < n_seqs:
        raise UserError(
            f"{len(long_enough)} documents have {length} tokens or more, {n_seqs} were asked for; "
            "lower --n-seqs or --seq-len, or take --windows random"
        )
    order = torch.randperm(len(long_enough), generator=generator)[:n_seqs]
    return Windows(tokens=torch.tensor(long_enough)[order], documents=order)


def _starts(n_tokens: int, length: int, generator: Generator) -> list[int]:
    """Choose where the sequences of one document begin, in random order."""
    n_fit, slack = divmod(n_tokens, length)
    if n_fit == 0:
        return []
    offset = int(torch.randint(slack + 1, (), generator=generator))
    return [offset + length * k for k in torch.randperm(n_fit, generator=generator).tolist()]


def pack(
    ids: Sequence[Sequence[int]],
    n_seqs: int,
    length: int,
    separator: int,
    generator: torch.Generator,
) -> Windows:
    """Join documents in random order, each followed by a separator, and cut them into sequences.

    A sequence may begin and end anywhere in a document, and may hold several: later documents
    attend to the ones before them, as in most models' training. It counts as the document's that
    most of its tokens are from, the first of these.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        separator: the token after each document.
        generator: of the order.

    Raises:
        UserError: if there are too few tokens (it says how many there are).

    Example:
        >>> pack([[5, 6, 7, 8, 9]], 2, 3, 0, torch.Generator()).tokens
        tensor([[5, 6, 7],
                [8, 9, 0]])
    """
    n_tokens = sum(map(len, ids)) + len(ids)
    if n_tokens < n_seqs * length:
        raise UserError(
            f"{len(ids)} documents hold {n_tokens} tokens with their separators, which give "
            f"{n_tokens // length} sequences of {length}, {n_seqs} were asked for; lower --n-seqs "
            "or --seq-len"
        )
    order = torch.randperm(len(ids), generator=generator).tolist()
    joined = [token for index in order for token in (*ids[index], separator)]
    owners = [index for index in order for _ in range(len(ids[index]) + 1)]
    begins = range(0, n_seqs * length, length)
    documents = [Counter(owners[first : first + length]).most_common(1)[0][0] for first in begins]
    return Windows(
        tokens=torch.tensor(joined[: n_seqs * length]).view(n_seqs, length),
        documents=torch.tensor(documents),
    )


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token to put after each packed document: the tokenizer's EOS.

    Raises:
        UserError: if it has none.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "--pack puts an EOS token after each document, and the model's tokenizer has none"
        )
    return tokenizer.eos_token_id
