"""Attention as tensors: queries, keys and values, scores, grouped heads, masked cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nope_probe.errors import UserError
from nope_probe.maps.folds import TensorRecord
from nope_probe.maps.positions import Angles

HeadVectors = Float[Tensor, "batch pos head d_head"]
# With a KV cache there are more keys than queries; a removed W_K or W_V leaves a key or value head
# per query head.
Keys = Float[Tensor, "batch key_pos kv_head d_head"]
Values = Float[Tensor, "batch key_pos value_head d_value"]
Scores = Float[Tensor, "batch head query_pos key_pos"]
Visible = Bool[Tensor, "one_or_batch one_or_head query_pos key_pos"]
RowPositions: TypeAlias = Int[Tensor, " row"]
# Sequences up to this length are computed in one block of queries. Longer sequences are computed in
# blocks of this many cells, so that a block's masks and scores stay small next to a model.
WHOLE, BLOCK_CELLS = 2048, 2**24


def query_blocks(n_queries: int, cells_per_query: int) -> Iterator[slice]:
    """Return blocks of queries that have about `BLOCK_CELLS` cells.

    Up to `WHOLE` queries are a single block.

    Example:
        >>> list(query_blocks(5000, 5000))[:2]
        [slice(0, 3355, None), slice(3355, 5000, None)]
    """
    size = n_queries if n_queries <= WHOLE else max(1, BLOCK_CELLS // cells_per_query)
    for start in range(0, n_queries, max(1, size)):
        yield slice(start, min(start + size, n_queries))


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMask:
    """The keys that each query attends to, computed for some queries at a time.

    Attributes:
        n_queries, n_keys: its sizes; the last query is at the last key.
        device: where its cells are computed.
        sees: returns the cells of given queries (row numbers, as a column) and given keys (key
            numbers, as a row, or as a column of the same length).
        known: the mask's shape, if known without a look at the cells.
    """

    n_queries: int
    n_keys: int
    device: torch.device
    sees: Callable[[Int[Tensor, "query_pos one"], Int[Tensor, "#query_pos key_pos"]], Visible]
    known: Literal["causal", "full"] | None = None

    @classmethod
    def causal(cls, n_queries: int, n_keys: int, device: torch.device) -> AttentionMask:
        """Return the mask under which a query attends to itself and all earlier keys."""

        def sees(query: Tensor, key: Tensor) -> Visible:
            return (key <= query + n_keys - n_queries)[None, None]  # with a cache, keys are more

        return cls(n_queries=n_queries, n_keys=n_keys, device=device, sees=sees, known="causal")

    @classmethod
    def full(cls, n_queries: int, n_keys: int, device: torch.device) -> AttentionMask:
        """Return the mask that hides nothing."""

        def sees(query: Tensor, key: Tensor) -> Visible:
            return (key >= 0).expand(1, 1, len(query), -1)

        return cls(n_queries=n_queries, n_keys=n_keys, device=device, sees=sees, known="full")

    @classmethod
    def of(cls, visible: Visible) -> AttentionMask:
        """Return the mask of the visible cells that a model has computed."""
        n_queries, n_keys = visible.shape[-2:]

        def sees(query: Tensor, key: Tensor) -> Visible:
            return visible[..., query, key]

        return cls(n_queries=n_queries, n_keys=n_keys, device=visible.device, sees=sees)

    def rows(self, rows: slice | RowPositions = slice(None)) -> Visible:
        """Return the visible cells of some queries; no cells of other queries are made."""
        queries = torch.arange(self.n_queries, device=self.device)[rows]
        return self.sees(queries[:, None], torch.arange(self.n_keys, device=self.device)[None])

    def blocks(self) -> Iterator[tuple[slice, Visible]]:
        """Return the cells of all queries, a block of queries at a time."""
        for rows in query_blocks(self.n_queries, self.n_keys):
            yield rows, self.rows(rows)

    @cached_property
    def real(self) -> Bool[Tensor, "one_or_batch one_or_head key_pos"]:
        """Which positions are not padding: a mask hides padding even from itself."""
        position = torch.arange(self.n_queries, device=self.device)[:, None]
        return self.sees(position, position)[..., 0]

    @cached_property
    def is_causal(self) -> bool:
        """Whether every query attends to itself and all earlier keys, and to nothing else."""
        if self.known is not None or self.n_queries != self.n_keys:
            return self.known == "causal" and self.n_queries == self.n_keys
        causal = AttentionMask.causal(self.n_queries, self.n_keys, self.device)
        return all(bool((cells == causal.rows(rows)).all()) for rows, cells in self.blocks())

    def without_window(self) -> AttentionMask:
        """Return the mask under which all earlier keys but padding are visible."""
        return AttentionMask.causal(self.n_queries, self.n_keys, self.device)._with_keys(self.real)

    def both_ways(self, prefix: int | None = None) -> AttentionMask:
        """Return the mask under which keys that see a query are seen by it, but for padding.

        A window reaches as many keys behind a query as before it; without a window all keys are
        visible.

        Args:
            prefix: how many first positions, counted without padding, lose the mask among
                themselves; None for all positions.

        Raises:
            UserError: if a sequence is shorter than the prefix.
        """
        sees, real = self.sees, self.real
        if self.known == "causal":
            both_ways = AttentionMask.full(self.n_queries, self.n_keys, self.device)
        else:
            both_ways = replace(
                self, sees=lambda query, key: sees(query, key) | _transposed(sees, query, key)
            )
        both_ways = both_ways._with_keys(real)
        if prefix is None:
            return both_ways
        n = int(real.sum(-1).min())
        if prefix > n:
            raise UserError(f"a prefix of {prefix} positions, but the sequences have {n}")
        inside = real & (real.cumsum(-1) <= prefix)
        return replace(
            self,
            sees=lambda query, key: (
                sees(query, key)
                | (both_ways.sees(query, key) & inside[..., query] & inside[..., key])
            ),
            known=None,
        )

    def _with_keys(self, keys: Bool[Tensor, "one_or_batch one_or_head key_pos"]) -> AttentionMask:
        """Return the mask with all but some keys hidden."""
        if bool(keys.all()):
            return self
        return replace(
            self, sees=lambda query, key: self.sees(query, key) & keys[..., key], known=None
        )


def _transposed(sees: Callable[..., Visible], query: Tensor, key: Tensor) -> Visible:
    """Return the cells of a mask whose queries and keys are exchanged."""
    if query.shape == key.shape:
        return sees(key, query)  # pairs of positions
    return sees(key.mT, query.mT).mT


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanPattern(TensorRecord):
    """The mean attention pattern of some heads, which takes the place of what they attend to.

    Attributes:
        heads: the query heads.
        cells: the pattern, of causal heads its cells j <= i row by row.
        n: how many positions it has.
    """

    heads: Int[Tensor, " head"]
    cells: Float[Tensor, "head cell"] | Float[Tensor, "head query_pos key_pos"]
    n: int

    def of_heads(self, heads: Sequence[int]) -> MeanPattern:
        """Return the mean pattern of some of the heads.

        Raises:
            KeyError: for a head without one.
        """
        places = {int(head): place for place, head in enumerate(self.heads)}
        cells = self.cells[[places[head] for head in heads]]
        return MeanPattern(heads=torch.tensor(heads), cells=cells, n=self.n)

    def first(self, n: int) -> MeanPattern:
        """Return the mean pattern of the first n positions, which no later token of a text changes.

        Raises:
            UserError: for more positions than it has, or other than all where queries look ahead.
        """
        if n == self.n:
            return self
        if n > self.n or self.cells.ndim == 3:
            raise UserError(f"expected sequences of {self.n} tokens, got {n}")
        return MeanPattern(heads=self.heads, cells=self.cells[:, : n * (n + 1) // 2], n=n)

    def rows(self, rows: slice | RowPositions) -> Float[Tensor, "head row key_pos"]:
        """Return the rows of some queries."""
        if self.cells.ndim == 3:
            return self.cells[:, rows]
        queries = torch.arange(self.n)[rows]
        row, key = (torch.arange(self.n) <= queries[:, None]).nonzero().T
        query = queries[row]
        pattern = self.cells.new_zeros(len(self.cells), len(queries), self.n)
        pattern[:, row, key] = self.cells[:, query * (query + 1) // 2 + key]
        return pattern


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """The inputs of one block's attention in a forward pass.

    Attributes:
        q, k: queries and keys as they are multiplied: after every norm and rotation.
        v: values.
        mask: which keys each query attends to.
        scale: the factor between q.k and a score (1/sqrt(d_head) as a rule).
        soft_cap: c of c * tanh(score / c), or None (Gemma-2 has one).
        bias: the number added to every score (ALiBi), or None.
        sinks: the logit of each head's sink, which takes its share of every row outside the scores
            (gpt-oss), or None.
        angles: the angles by which RoPE turned q and k, or None.
        hooked: the scores after the hooks on `hook_attn_scores`; None without such hooks.
        hooked_pattern: the pattern after the hooks on `hook_pattern`; None without such hooks.
        fixed: the pattern of the heads that lose their content, whatever their scores; or None.
    """

    q: HeadVectors
    k: Keys
    v: Values
    mask: AttentionMask
    scale: float
    soft_cap: float | None = None
    bias: Float[Tensor, "one_or_batch one_or_head query_pos key_pos"] | None = None
    sinks: Float[Tensor, " head"] | None = None
    angles: Angles | None = None
    hooked: Scores | None = None
    hooked_pattern: Scores | None = None
    fixed: MeanPattern | None = None

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
        assert self.hooked is not None
        visible = self.visible_per_head[None]
        product = replace(self, soft_cap=None, bias=None, hooked=None).scores()[:1]
        error = relative_error(product[visible], self.hooked[:1][visible])
        return error <= max(1e-5, 4 * torch.finfo(self.q.dtype).eps)

    def among(self, coordinates: Int[Tensor, " coordinate"]) -> Attention:
        """Return attention whose scores are the part that some coordinates of q and k make.

        Raises:
            NotImplementedError: for scores that are no sum over coordinates.
        """
        if self.soft_cap is not None or self.hooked is not None:
            raise NotImplementedError("soft-capped or hooked scores are no sum over coordinates")
        q, k = (x[..., coordinates.to(x.device)] for x in (self.q, self.k))
        return replace(self, q=q, k=k, bias=None)

    @property
    def visible_to_all(self) -> Bool[Tensor, "query_pos key_pos"]:
        """The cells that are visible in every head of the first sequence."""
        return self.mask.rows()[0].all(0)

    @property
    def visible_per_head(self) -> Bool[Tensor, "head query_pos key_pos"]:
        """The cells that are visible in each head of the first sequence."""
        return self.mask.rows()[0].expand(self.n_heads, -1, -1)

    def scores(self, rows: slice | RowPositions = slice(None), keys: slice = slice(None)) -> Scores:
        """Return the scores of some queries with some keys (by default all), masked ones too."""
        if self.hooked is not None:
            return self.hooked[:, :, rows, keys]
        k = repeat_heads(self.k[:, keys], self.n_heads)
        scores = torch.einsum("bqhd,bkhd->bhqk", self.q[:, rows], k) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        return scores if self.bias is None else scores + self.bias[..., rows, keys].to(scores)

    def masked_scores(
        self, rows: slice | RowPositions = slice(None), masked: float | None = -torch.inf
    ) -> Scores:
        """Return the scores of some queries; masked ones get a value, None for the lowest."""
        scores = self.scores(rows)
        masked = torch.finfo(scores.dtype).min if masked is None else masked
        return scores.masked_fill(~self.mask.rows(rows), masked)

    def pattern(
        self, rows: slice | RowPositions = slice(None), masked: float | None = -torch.inf
    ) -> Scores:
        """Return the weights of the values for some queries: attention, less a sink's share.

        It is as hooks left it; `masked` is that of `masked_scores`.
        """
        if self.hooked_pattern is not None:
            return self.hooked_pattern[:, :, rows]
        is_hooked = self.hooked is not None
        scores = self.scores(rows) if is_hooked else self.masked_scores(rows, masked)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        if self.sinks is None:
            pattern = scores.softmax(-1, dtype=dtype)
        else:
            sink = self.sinks[:, None, None].to(scores).expand(*scores.shape[:3], 1)
            pattern = torch.cat((scores, sink), -1).softmax(-1, dtype=dtype)[..., :-1]
        if self.fixed is not None:
            heads, means = self.fixed.heads.to(pattern.device), self.fixed.rows(rows).to(pattern)
            pattern = pattern.index_copy(1, heads, means.expand(len(pattern), -1, -1, -1))
        return pattern.nan_to_num().to(self.v.dtype)  # NaN: the rows of padding

    def hooked_weights(self, rows: slice | RowPositions = slice(None)) -> Scores | None:
        """Return the pattern that hooks left, or that is fixed, without a sink's share.

        A sink's share of a row is that before the hooks.

        Returns:
            None where the pattern is the softmax of the scores.
        """
        if self.hooked_pattern is None and self.fixed is None:
            return None
        weights = upcast(self.pattern(rows))
        if self.sinks is None:
            return weights
        of_keys = upcast(replace(self, hooked_pattern=None).pattern(rows)).sum(-1, keepdim=True)
        return weights / of_keys.clamp_min(torch.finfo(weights.dtype).tiny)

    def weighted_values(self) -> Float[Tensor, "batch pos head d_value"]:
        """Return softmax(scores) v without a tensor of scores, or of all masked cells."""
        q, k, v = self.q, self.k, self.v.to(self.q.dtype)
        if k.shape[2] != v.shape[2]:
            k, v = repeat_heads(k, self.n_heads), repeat_heads(v, self.n_heads)
        q, k, v = (rearrange(x, "batch pos head d -> batch head pos d") for x in (q, k, v))
        fused = partial(
            scaled_dot_product_attention, scale=self.scale, enable_gqa=k.shape[1] < q.shape[1]
        )
        if self.bias is None and (self.mask.is_causal or self.mask.known == "full"):
            z = fused(q, k, v, is_causal=self.mask.is_causal)
            return rearrange(z, "batch head pos d -> batch pos head d").to(self.v.dtype)
        blocks = []
        for rows, visible in self.mask.blocks():
            keys = _span(visible)
            cells = visible[..., keys]
            added = None if bool(cells.all()) else cells
            if self.bias is not None:
                bias = self.bias[..., rows, keys].to(q.dtype)
                added = bias.masked_fill(~cells, -torch.inf)
            z = fused(q[..., rows, :], k[..., keys, :], v[..., keys, :], attn_mask=added)
            blocks.append(rearrange(z, "batch head pos d -> batch pos head d"))
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)).to(self.v.dtype)


def _span(visible: Visible) -> slice:
    """Return the range of keys, from the first to the last that any query sees."""
    seen = visible.flatten(0, -2).any(0).nonzero().flatten()
    return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(None)


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

    The error is NaN if any value is NaN or there are no values.
    """
    if expected.numel() == 0:
        return float("nan")
    return float((values - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return a tensor of half precision in float32, and any other as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def whole(weight: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Return a weight that is spread over processes (a DTensor) whole, and any other as it is."""
    spread: Any = weight
    return spread.full_tensor() if hasattr(spread, "full_tensor") else weight


def score_tolerance(dtype: torch.dtype) -> float:
    """Return the relative error up to which scores of a precision count as equal."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.05


def sum_query_groups(
    q: Float[Tensor, "*pos head d_head"], n_kv_heads: int
) -> Float[Tensor, "*pos kv_head d_head"]:
    """Sum the queries that share a key head: the sum of their scores is one inner product."""
    return reduce(q, "... (kv_head group) d -> ... kv_head d", "sum", kv_head=n_kv_heads)


def repeat_heads(
    x: Float[Tensor, "batch pos kv_head d_head"], n_heads: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Repeat each key or value head for every query head that shares it."""
    return x if x.shape[2] == n_heads else x.repeat_interleave(n_heads // x.shape[2], dim=2)
