"""Documents joined end to end and cut into windows: every token is used, none is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def packed(
    ids: Sequence[Sequence[int]],
    n_seqs: int,
    length: int,
    separator: int,
    generator: torch.Generator,
) -> Int[Tensor, "seq pos"]:
    """Join documents in random order, each followed by a separator, and cut them into windows.

    A window may begin and end anywhere in a document, and may hold several: later documents see
    the ones before them, as in most models' training.

    Raises:
        UserError: if there are too few tokens (it says how many there are).

    Example:
        >>> packed([[5, 6, 7, 8, 9]], 2, 3, 0, torch.Generator())
        tensor([[5, 6, 7],
                [8, 9, 0]])
    """
    n_tokens = sum(map(len, ids)) + len(ids)
    if n_tokens < n_seqs * length:
        raise UserError(
            f"{len(ids)} documents hold {n_tokens} tokens with their separators, which give "
            f"{n_tokens // length} windows of {length}, {n_seqs} were asked for; lower --n-seqs "
            "or --seq-len"
        )
    order = torch.randperm(len(ids), generator=generator).tolist()
    joined = [token for index in order for token in (*ids[index], separator)]
    return torch.tensor(joined[: n_seqs * length]).view(n_seqs, length)


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the token that stands between packed documents: the tokenizer's EOS.

    Raises:
        UserError: if it has none.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "--pack puts an EOS token after each document, and the model's tokenizer has none"
        )
    return tokenizer.eos_token_id
