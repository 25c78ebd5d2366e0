"""Readings of blocks on a short batch: hidden keys, and attention to chosen keys.

Attention to a chosen key per query is read without a map of n x n weights per head.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs
from nope_probe.hooks.layers.passes import read_attention
from nope_probe.maps.positions import NO_ROTATION, Rotation

ROWS = 128  # queries whose scores are in memory at once
RowWeights = Float[Tensor, "batch head query_pos which"]


def rotation_of(attention: Attention, rotary: Rotation | None) -> Rotation:
    """Return a block's rotation in a pass."""
    if rotary is None:
        return NO_ROTATION
    if attention.angles is None or rotary.columns is None:
        return rotary
    return rotary.at(attention.angles)


def window_hides(model: HookedModel, inputs: Inputs, n_layers: int) -> bool:
    """Return whether one of the first blocks hides an earlier key of the first sequence."""

    def hides(layer: Layer, attention: Attention) -> bool:
        return bool((~attention.visible_to_all).tril().any())

    return any(read_attention(model, inputs, hides, n_layers=n_layers))


def weights_on(attention: Attention, keys: Int[Tensor, "which query_pos"]) -> RowWeights:
    """Return each query's attention to chosen keys, on the CPU.

    Attention is the softmax of the scores, or what hooks on `hook_pattern` made of it: a learned
    sink outside the scores (as in gpt-oss) is left out.
    """
    n_pos = attention.q.shape[1]
    blocks = [slice(start, start + ROWS) for start in range(0, n_pos, ROWS)]
    weights = [_weights_of_rows(attention, rows, keys[:, rows]) for rows in blocks]
    return torch.cat(weights, 2).cpu()


def keys_before(n_pos: int, distance: int) -> Int[Tensor, " query_pos"]:
    """Return the key at a distance before each query; 0 for queries without such a key."""
    return (torch.arange(n_pos) - distance).clamp_min(0)


def _weights_of_rows(
    attention: Attention, rows: slice, keys: Int[Tensor, "which query_pos"]
) -> RowWeights:
    hooked = attention.hooked_weights(rows)
    if hooked is None:
        return weights_at(attention.masked_scores(rows), keys)
    return hooked.gather(-1, keys.T.to(hooked.device).expand(*hooked.shape[:3], -1))


def weights_at(
    scores: Float[Tensor, "batch head query_pos key_pos"], keys: Int[Tensor, "which query_pos"]
) -> RowWeights:
    """Return exp(s - logsumexp(s)) of chosen cells of scores, in float32 or better."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    where = keys.T.to(scores.device).expand(*scores.shape[:3], -1)
    return (scores.gather(-1, where) - scores.logsumexp(-1, keepdim=True)).exp()


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
