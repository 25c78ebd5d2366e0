"""Windows: sequences cut out of documents, packed from them, permuted or repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from nope_probe.errors import UserError

WindowStart = Literal["random", "start"]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Sequences cut out of documents.

    Attributes:
        tokens: their tokens.
        documents: the number of each sequence's document. A document's sequences are not
            independent. None if sequences are drawn singly.
    """

    tokens: Int[Tensor, "seq pos"]
    documents: Int[Tensor, " seq"] | None = None


def windows_of(
    ids: list[list[int]],
    n_seqs: int,
    length: int,
    start: WindowStart,
    separator: int | None,
    generator: Generator,
) -> Windows:
    """Cut sequences out of documents: at random places, at their starts, or out of all joined.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        start: where a sequence begins in its document.
        separator: the token after each document, if documents are joined; None if they are not.
        generator: draws all random choices.

    Raises:
        UserError: for too few sequences (naming their number).
    """
    if separator is not None:
        return pack_documents(ids, n_seqs, length, separator, generator)
    return (cut if start == "random" else cut_at_start)(ids, n_seqs, length, generator)


def random_windows(
    ordinary: Int[Tensor, " token"], n_seqs: int, length: int, generator: Generator
) -> Windows:
    """Draw sequences of independent tokens."""
    places = torch.randint(len(ordinary), (n_seqs, length), generator=generator)
    return Windows(tokens=ordinary[places])


def cut(ids: list[list[int]], n_seqs: int, length: int, generator: Generator) -> Windows:
    """Cut sequences that do not overlap at random places, taking documents in turn.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        generator: draws all random choices.

    Raises:
        UserError: for too few sequences (naming their number).
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
    """Take the first tokens of n_seqs documents that are long enough, in random order.

    Raises:
        UserError: for too few documents (naming their number).
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
    """Choose the starts of a document's sequences, in random order."""
    n_fit, slack = divmod(n_tokens, length)
    if n_fit == 0:
        return []
    offset = int(torch.randint(slack + 1, (), generator=generator))
    return [offset + length * k for k in torch.randperm(n_fit, generator=generator).tolist()]


def pack_documents(
    ids: Sequence[Sequence[int]],
    n_seqs: int,
    length: int,
    separator: int,
    generator: Generator,
) -> Windows:
    """Join documents in random order, each followed by a separator, and cut them into sequences.

    A sequence may begin and end anywhere in a document, and may hold several documents: later
    documents attend to earlier documents, as in most models' training. A sequence belongs to the
    document with most of its tokens, and in a tie to the first.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        separator: the token after each document.
        generator: draws the order.

    Raises:
        UserError: for too few tokens (naming their number).

    Example:
        >>> pack_documents([[5, 6, 7, 8, 9]], 2, 3, 0, torch.Generator()).tokens
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


def permuted(
    tokens: Int[Tensor, "seq pos"], generator: Generator, first: int = 0, stop: int | None = None
) -> Int[Tensor, "seq pos"]:
    """Return sequences with the tokens of the positions first to stop - 1 in random order.

    Example:
        >>> permuted(torch.arange(7)[None], torch.Generator().manual_seed(0), 1, 3)[:, [0, 3, 6]]
        tensor([[0, 3, 6]])
    """
    shuffled = tokens.clone()
    some = shuffled[:, first:stop]
    order = torch.rand(some.shape, generator=generator).argsort(-1)
    shuffled[:, first:stop] = some.gather(-1, order)
    return shuffled
