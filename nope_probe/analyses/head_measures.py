"""Measures of a head's attention: to the first key, to the previous token, and induction."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.reading.batch_readings import keys_before, weights_on


def attended(attention: Attention) -> dict[str, Float[Tensor, "batch head"]]:
    """Return the mean attention of every head to the first key and to the previous token.

    `first_key` is over all queries but the first, which has no other key. A head is a sink head if
    its mean over sequences exceeds 0.3 (Gu et al., arXiv 2410.10781, whose sink score is the share
    of such heads). `previous_token` is at key i - 1, over queries i >= 2: key i - 1 of query 1 is
    the first key. Attention is the softmax of the scores, so a learned sink outside them (as in
    gpt-oss) is left out.
    """
    n_pos = attention.q.shape[1]
    keys = torch.stack((torch.zeros(n_pos, dtype=torch.long), keys_before(n_pos, 1)))
    to_first, to_previous = weights_on(attention, keys).unbind(-1)
    return {
        "first_key": to_first[..., 1:].mean(-1),
        "previous_token": to_previous[..., 2:].mean(-1),
    }


def induction_scores(attention: Attention, n_tokens: int) -> Float[Tensor, "batch head"]:
    """Return the mean attention of every head at key i - (n - 1), over queries of the second copy.

    That key follows the previous occurrence of the query's token.

    Args:
        attention: in n random tokens and their copy, with or without BOS before them.
        n_tokens: n.

    Raises:
        ValueError: if the sequence is shorter than two copies.
    """
    n_pos = attention.q.shape[1]
    if n_pos < 2 * n_tokens:
        raise ValueError(f"expected two copies of {n_tokens} tokens, got {n_pos} positions")
    keys = keys_before(n_pos, n_tokens - 1)[None]
    return weights_on(attention, keys)[..., -n_tokens:, 0].mean(-1)
