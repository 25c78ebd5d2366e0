"""Measures of a head's attention: to the first key, to the previous token, and induction."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.reading.batch_readings import keys_before, weights_on


def first_key_attention(to_first: Float[Tensor, "*batch query_pos"]) -> Float[Tensor, "*batch"]:
    """Return the mean attention to the first key, over all queries but the first.

    The first query has no other key. A head is a sink head if this mean over sequences exceeds 0.3
    (Gu et al., arXiv 2410.10781, whose sink score is the share of such heads).

    Args:
        to_first: each query's attention to the first key.

    Example:
        >>> first_key_attention(torch.tensor([1.0, 0.5, 0.1]))
        tensor(0.3000)
    """
    return to_first[..., 1:].mean(-1)


def previous_token_attention(
    to_previous: Float[Tensor, "*batch query_pos"],
) -> Float[Tensor, "*batch"]:
    """Return the mean attention at key i - 1, over queries i >= 2.

    Query 1 is left out because its key i - 1 is the first key; see `first_key_attention`.

    Args:
        to_previous: each query's attention to key i - 1; query 0 is ignored.

    Example:
        >>> previous_token_attention(torch.tensor([1.0, 0.5, 0.2]))
        tensor(0.2000)
    """
    return to_previous[..., 2:].mean(-1)


def induction_attention(
    to_next: Float[Tensor, "*batch query_pos"], n_tokens: int
) -> Float[Tensor, "*batch"]:
    """Return the mean attention at key i - (n - 1), over the queries i of the second copy.

    That key follows the previous occurrence of the query's token.

    Args:
        to_next: each query's attention to that key, in n random tokens and their copy, with or
            without BOS before them; earlier queries are ignored.
        n_tokens: n.

    Raises:
        ValueError: if the sequence is shorter than two copies.
    """
    n_pos = to_next.shape[-1]
    if n_pos < 2 * n_tokens:
        raise ValueError(f"expected two copies of {n_tokens} tokens, got {n_pos} positions")
    return to_next[..., -n_tokens:].mean(-1)


def induction_scores(attention: Attention, n_tokens: int) -> Float[Tensor, "batch head"]:
    """Return the `induction_attention` of every head to sequences of n random tokens twice."""
    keys = keys_before(attention.q.shape[1], n_tokens - 1)[None]
    return induction_attention(weights_on(attention, keys)[..., 0], n_tokens)
