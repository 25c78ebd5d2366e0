"""Join documents end to end and cut them into sequences: every token is used, none is padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nope_probe.data.cutting import Windows
from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
