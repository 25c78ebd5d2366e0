"""Mean queries and keys at each position, and each component's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps.folds import TensorRecord
from nope_probe.maps.rotation import NO_ROTATION, Rotation
from nope_probe.maps.rows import QueryPositions

Queries = Float[Tensor, "fold pos head d_head"]
KeyMeans = Float[Tensor, "fold pos kv_head d_head"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReaderSums:
    """Fold means of one layer's queries and keys before RoPE, float64.

    Attributes:
        q, k: mean queries and keys at each position. For means over heads, the queries that share a
            key head are added up, which suffices. For single heads, `q` holds all heads.
        queries, keys: the part of each writer; the parts add up to `q` and `k`.
        first_queries, first_keys: for writers that are heads, the part that they moved from the
            first key; or to one position, by the token that they moved it from.
        norm_queries, norm_keys: queries and keys that the norms make of vectors that know nothing
            of position: the norms' mean scale at each position times the mean over positions; None
            without writers.
        norm_scale: the norms' mean scale at each position; None without writers.
        scores: mean q.k times the scale, nats, over heads or per head; NaN where masked.
        bias: the bias added to the scores (ALiBi), nats; None without a bias.
        scale: the factor between the sum of q.k over the heads of `q` and `scores`.
        rotation: the rotation of q and k by RoPE.
        query_positions: the queries of the rows of scores; all by default.
    """

    q: Queries
    k: KeyMeans
    queries: Mapping[str, Queries] = field(default_factory=dict)
    keys: Mapping[str, KeyMeans] = field(default_factory=dict)
    first_queries: Mapping[str, Queries] = field(default_factory=dict)
    first_keys: Mapping[str, KeyMeans] = field(default_factory=dict)
    norm_queries: Queries | None = None
    norm_keys: KeyMeans | None = None
    norm_scale: Float[Tensor, "fold pos"] | None = None
    scores: Float[Tensor, "fold *head row key_pos"]
    bias: Float[Tensor, "*head row key_pos"] | None = None
    scale: float
    rotation: Rotation = NO_ROTATION
    query_positions: QueryPositions = None

    @property
    def per_head(self) -> bool:
        """Whether single heads are kept."""
        return self.scores.ndim == 4

    def heads(self) -> Iterator[tuple[int | None, ReaderSums]]:
        """Yield each head as a reader, with its number; for means over heads, yield the layer."""
        if not self.per_head:
            yield None, self
            return
        n_heads = self.q.shape[2]
        for head in range(n_heads):
            key_head = head * self.k.shape[2] // n_heads
            of_head = replace(
                self,
                q=self.q[:, :, [head]],
                k=self.k[:, :, [key_head]],
                queries={name: x[:, :, [head]] for name, x in self.queries.items()},
                keys={name: x[:, :, [key_head]] for name, x in self.keys.items()},
                first_queries={name: x[:, :, [head]] for name, x in self.first_queries.items()},
                first_keys={name: x[:, :, [key_head]] for name, x in self.first_keys.items()},
                norm_queries=None if self.norm_queries is None else self.norm_queries[:, :, [head]],
                norm_keys=None if self.norm_keys is None else self.norm_keys[:, :, [key_head]],
                scores=self.scores[:, head],
                bias=None if self.bias is None else self.bias[head],
            )
            yield head, of_head


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionSums(TensorRecord):
    """The mean queries and keys of a model's readers at each position, by writer.

    Attributes:
        readers: the sums of each layer, by number.
        counts: sequences per fold.
        bos: whether all sequences begin with the same token.
        skip_keys: how many keys count as first; captures set 1 for tokens.
        kept_positions: how many first positions means over positions leave out; captures set 1
            where all sequences begin with the same token, because removals keep what is written
            there.
    """

    readers: Mapping[int, ReaderSums]
    counts: Int[Tensor, " fold"]
    bos: bool = False
    skip_keys: int = 0
    kept_positions: int = 0
