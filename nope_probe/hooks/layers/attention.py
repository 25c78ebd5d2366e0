"""Attention as tensors: scores, grouped heads, masked cells, RoPE and the pairs it rotates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import pi

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.components import BAND


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """How one block rotates queries and keys.

    Attributes:
        frequencies: the angle per position of each pair, radians.
        factor: what rotated queries and keys are multiplied with at every position, 1 as a rule;
            the attention factor of YaRN and LongRoPE.
    """

    frequencies: Float[Tensor, " pair"]
    factor: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RemovedPairs:
    """The rotary pairs of one block that are removed: rotated as at position 0.

    Attributes:
        bands: names of bands, or `rope`.
        rotary: how the block rotates its pairs.

    Raises:
        ValueError: for a band of pairs that do not exist.
    """

    bands: Collection[str]
    rotary: Rotary

    def __post_init__(self) -> None:
        n = len(self.rotary.frequencies)
        for name in self.bands:
            begin, end = self._limits(name)
            if not 0 <= begin < end <= n:
                raise ValueError(f"no band {name}: the model rotates {n} pairs, rope[0:{n}]")

    def _limits(self, name: str) -> tuple[int, int]:
        found = BAND.fullmatch(name)
        return (int(found[1]), int(found[2])) if found else (0, len(self.rotary.frequencies))

    def mask(self, n_pos: int) -> Bool[Tensor, " pair"]:
        """Return which pairs are removed in sequences of some length."""
        removed = torch.zeros(len(self.rotary.frequencies), dtype=torch.bool)
        is_high = 2 * pi / self.rotary.frequencies < n_pos
        for name in self.bands:
            begin, end = self._limits(name)
            every = {"rope_high": is_high, "rope_low": ~is_high}.get(name, torch.ones_like(is_high))
            removed[begin:end] |= every[begin:end]
        return removed


def angle_per_pair(angles: Float[Tensor, " d_rotary"], twice: bool) -> Float[Tensor, " pair"]:
    """Return one angle per pair from those of all coordinates, 0 0 1 1 or 0 1 0 1."""
    return (angles[::2] if twice else angles[: len(angles) // 2]).cpu()
