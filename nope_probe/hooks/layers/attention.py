"""Attention as tensors: what it is computed from, scores, grouped heads, masked cells."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nope_probe.hooks.layers.rotation import Angles

Heads = Float[Tensor, "batch pos head d_head"]
# With a KV cache there are more keys than queries; a removed W_K or W_V leaves a key or value head
# per query head.
Keys = Float[Tensor, "batch key_pos kv_head d_head"]
Values = Float[Tensor, "batch key_pos value_head d_value"]
Scores = Float[Tensor, "batch head query_pos key_pos"]
Visible = Bool[Tensor, "one_or_batch one_or_head query_pos key_pos"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """What one block's attention is computed from in a forward pass.

    Attributes:
        q, k: queries and keys as they are multiplied: after every norm and rotation.
        v: values.
        visible: which keys each query attends to.
        scale: the factor between q.k and a score (1/sqrt(d_head) as a rule).
        soft_cap: c of c * tanh(score / c), or None (Gemma-2 has one).
        bias: what is added to the scores (ALiBi), or None.
        sinks: the logit of each head's sink, which takes its share of every row outside the scores
            (gpt-oss), or None.
        angles: by which RoPE turned q and k, or None.
        hooked: the scores as hooks on `hook_attn_scores` left them; None without such hooks.
    """

    q: Heads
    k: Keys
    v: Values
    visible: Visible
    scale: float
    soft_cap: float | None = None
    bias: Float[Tensor, "one_or_batch head query_pos key_pos"] | None = None
    sinks: Float[Tensor, " head"] | None = None
    angles: Angles | None = None
    hooked: Scores | None = None

    @property
    def n_heads(self) -> int:
        """How many query heads there are."""
        return self.q.shape[2]

    @property
    def is_product(self) -> bool:
        """Whether scores are q.k times the scale, and no more."""
        return self.soft_cap is None and self.bias is None and self.hooked is None

    def equals_product(self) -> bool:
        """Whether the scores of the first sequence are q.k times the scale, as hooks left them."""
        if self.hooked is None:
            return self.is_product
        visible = self.visible[:1].expand(1, self.n_heads, -1, -1)
        product = replace(self, soft_cap=None, bias=None, hooked=None).scores()[:1]
        error = relative_error(product[visible], self.hooked[:1][visible])
        return error <= max(1e-5, 4 * torch.finfo(self.q.dtype).eps)

    @property
    def visible_to_all(self) -> Bool[Tensor, "query_pos key_pos"]:
        """The cells that are visible in every head of the first sequence."""
        return self.visible[0].all(0)

    @property
    def visible_per_head(self) -> Bool[Tensor, "head query_pos key_pos"]:
        """The cells that are visible in each head of the first sequence."""
        return self.visible[0].expand(self.n_heads, -1, -1)

    def scores(self, rows: slice | Int[Tensor, " row"] = slice(None)) -> Scores:
        """Return the scores of some queries with every key, masked ones too."""
        if self.hooked is not None:
            return self.hooked[:, :, rows]
        k = repeat_heads(self.k, self.n_heads)
        scores = torch.einsum("bqhd,bkhd->bhqk", self.q[:, rows], k) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        return scores if self.bias is None else scores + self.bias[..., rows, :].to(scores)

    def pattern(self, scores: Scores) -> Scores:
        """Return the attention weights of masked scores, less what a sink takes."""
        dtype = torch.promote_types(scores.dtype, torch.float32)
        if self.sinks is None:
            pattern = scores.softmax(-1, dtype=dtype)
        else:
            sink = self.sinks[:, None, None].to(scores).expand(*scores.shape[:3], 1)
            pattern = torch.cat((scores, sink), -1).softmax(-1, dtype=dtype)[..., :-1]
        return pattern.nan_to_num().to(self.v.dtype)  # NaN: the rows of padding

    def weighted_values(self) -> Float[Tensor, "batch pos head d_value"]:
        """Return softmax(scores) v without a tensor of scores."""
        q, k, v = self.q, self.k, self.v.to(self.q.dtype)
        if k.shape[2] != v.shape[2]:
            k, v = repeat_heads(k, self.n_heads), repeat_heads(v, self.n_heads)
        q, k, v = (rearrange(x, "batch pos head d -> batch head pos d") for x in (q, k, v))
        visible = self.visible[:1] if self.visible.stride(0) == 0 else self.visible
        is_square = q.shape[2] == k.shape[2]
        causal = is_square and torch.equal(visible, torch.ones_like(visible).tril())
        mask = None if causal or bool(visible.all()) else visible
        if self.bias is not None:
            mask, causal = self.bias.to(q.dtype).masked_fill(~visible, -torch.inf), False
        z = scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=mask,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=k.shape[1] < q.shape[1],
        )
        return rearrange(z, "batch head pos d -> batch pos head d").to(self.v.dtype)


def unmasked(
    scores: Float[Tensor, "*heads query_pos key_pos"],
) -> Bool[Tensor, "*heads query_pos key_pos"]:
    """Return which cells of scores a model did not mask.

    Masked scores are -inf on HookedTransformer and finfo.min on bridges. NaN counts as unmasked,
    so that it is noticed.
    """
    return ~(scores <= torch.finfo(scores.dtype).min / 2)


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
