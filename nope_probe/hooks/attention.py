"""Attention scores as tensors: RoPE, grouped heads, masked cells, relative errors."""

from __future__ import annotations

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor


def unmasked(
    scores: Float[Tensor, "*heads query_pos key_pos"],
) -> Bool[Tensor, "*heads query_pos key_pos"]:
    """Return which cells of scores a model did not mask.

    Masked scores are -inf on HookedTransformer and finfo.min on bridges. NaN counts as unmasked,
    so that it is noticed.
    """
    return ~(scores <= torch.finfo(scores.dtype).min / 2)


def check_no_cache(n_queries: int, n_keys: int) -> None:
    """Check that keys are of the same positions as queries.

    Raises:
        ValueError: if some keys come from a cache.
    """
    if n_queries != n_keys:
        raise ValueError(
            f"{n_keys} keys for {n_queries} queries: in this ablation a position depends on all "
            "others, so that no cache of keys and values holds; pass whole sequences"
        )


def relative_error(values: Float[Tensor, "*shape"], expected: Float[Tensor, "*shape"]) -> float:
    """Return the largest difference relative to the largest expected value.

    NaN if any value is NaN or there is none.
    """
    if expected.numel() == 0:
        return float("nan")
    return float((values - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def score_tolerance(dtype: torch.dtype) -> float:
    """Return up to which relative error scores of a precision count as equal."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.05


def sum_query_groups(
    q: Float[Tensor, "batch pos head d_head"], n_kv_heads: int
) -> Float[Tensor, "batch pos kv_head d_head"]:
    """Sum the queries that share a key head: the sum of their scores is one inner product."""
    return reduce(
        q, "batch pos (kv_head group) d_head -> batch pos kv_head d_head", "sum", kv_head=n_kv_heads
    )


def repeat_heads(
    x: Float[Tensor, "batch pos kv_head d_head"], n_heads: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Repeat each key or value head for every query head that shares it."""
    return x if x.shape[2] == n_heads else x.repeat_interleave(n_heads // x.shape[2], dim=2)


def rotated(
    x: Float[Tensor, "batch pos head d_head"],
    cos: Float[Tensor, "one pos d_rotary"],
    sin: Float[Tensor, "one pos d_rotary"],
    adjacent: bool = False,
) -> Float[Tensor, "batch pos head d_head"]:
    """Rotate the first d_rotary coordinates of each head in pairs (f, f + d_rotary/2).

    With `adjacent`, the pairs are (2f, 2f + 1), as in GLM; cos and sin come in the first layout.
    """
    half = cos.shape[-1] // 2
    if adjacent:
        cos, sin = (t[..., :half].repeat_interleave(2, -1) for t in (cos, sin))
    cos, sin = cos[:, :, None], sin[:, :, None]
    turn, rest = x[..., : 2 * half], x[..., 2 * half :]
    if adjacent:
        turned = torch.stack((-turn[..., 1::2], turn[..., 0::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-turn[..., half:], turn[..., :half]), -1)
    return torch.cat((turn * cos + turned * sin, rest), -1)
