"""Queries and keys at each position: their rotation by RoPE, and their means by component."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.maps.folds import TensorRecord
from nope_probe.maps.rows import QueryPositions

Queries = Float[Tensor, "fold pos head d_head"]
KeyMeans = Float[Tensor, "fold pos kv_head d_head"]
# The angles of all positions, as a model passes them to attention: cos and sin, complex numbers, or
# the positions themselves.
Angles: TypeAlias = tuple[Tensor, Tensor] | Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation(TensorRecord):
    """The rotation of queries and keys by RoPE at some positions.

    Attributes:
        pairs: the two coordinates of a head that each pair turns; None if they are not known.
        cos, sin: cos and sin of the angle of each pair at positions 0, 1, ...
        factor: multiplies turned queries and keys at every position: the attention factor of YaRN
            and LongRoPE, 1 as a rule.
        columns: the pair of each column of the model's angles; None if they are not known.

    Example:
        >>> angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
        >>> pairs = torch.tensor([[0, 2], [1, 3]])
        >>> rotation = Rotation(pairs=pairs, cos=angles.cos(), sin=angles.sin())
        >>> [round(angle, 6) for angle in rotation.frequencies.tolist()]
        [1.0, 0.1]
    """

    pairs: Int[Tensor, "pair two"] | None
    cos: Float[Tensor, "*batch pos pair"]
    sin: Float[Tensor, "*batch pos pair"]
    factor: float = 1.0
    columns: Int[Tensor, " column"] | None = None

    @property
    def known_pairs(self) -> Int[Tensor, "pair two"]:
        """The pairs.

        Raises:
            NotImplementedError: if they are not known.
        """
        if self.pairs is None:
            raise NotImplementedError("RoPE's pairs of coordinates were not recognised")
        return self.pairs

    @property
    def frequencies(self) -> Float[Tensor, " pair"]:
        """The angle of each pair per position, radians, from positions 0 and 1.

        It is negative where the second coordinate of a pair turns to the first.
        """
        cos, sin = (x[(0,) * (x.ndim - 2)][:2].double().cpu() for x in (self.cos, self.sin))
        sine, cosine = sin[1] * cos[0] - cos[1] * sin[0], cos[1] * cos[0] + sin[1] * sin[0]
        return torch.atan2(sine, cosine)

    def at(self, angles: Angles) -> Rotation:
        """Return the rotation in a pass, whose frequencies may depend on the pass's length."""
        assert self.columns is not None
        firsts = [self.columns.tolist().index(pair) for pair in range(self.cos.shape[-1])]
        cos, sin = (table[..., firsts] for table in cos_and_sin(angles))
        factor = float(torch.hypot(cos.double(), sin.double()).flatten()[0])
        return replace(self, cos=cos / factor, sin=sin / factor, factor=factor)

    def of(self, pairs: Bool[Tensor, " pair"]) -> Rotation:
        """Return the rotation of some pairs alone."""
        cos, sin = (x[..., pairs.to(x.device)] for x in (self.cos, self.sin))
        return replace(self, pairs=self.known_pairs[pairs], cos=cos, sin=sin, columns=None)

    def among(self, positions: slice) -> Rotation:
        """Return the rotation at some of the positions."""
        cos, sin = (x[..., positions, :].clone() for x in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin)

    def turned(
        self, x: Float[Tensor, "*batch pos head d_head"]
    ) -> Float[Tensor, "*batch pos head d_head"]:
        """Return queries or keys turned as at their positions."""
        if not len(self.known_pairs):
            return x
        first, second = map(_as_slice, self.known_pairs.T)
        result, low, high = x.clone(), x[..., first], x[..., second]
        at_least_float32 = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (y[..., None, :].to(x.device, at_least_float32) for y in (self.cos, self.sin))
        result[..., first] = (low * cos - high * sin).to(x.dtype)
        result[..., second] = (high * cos + low * sin).to(x.dtype)
        return result

    def turned_back(
        self, x: Float[Tensor, "*batch pos head d_head"]
    ) -> Float[Tensor, "*batch pos head d_head"]:
        """Return turned queries or keys as at position 0."""
        return replace(self, sin=-self.sin).turned(x)


NO_ROTATION = Rotation(
    pairs=torch.zeros(0, 2, dtype=torch.long), cos=torch.zeros(2, 0), sin=torch.zeros(2, 0)
)


def cos_and_sin(angles: Angles) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a model's angles."""
    return (angles.real, angles.imag) if isinstance(angles, Tensor) else angles


def _as_slice(coordinates: Int[Tensor, " pair"]) -> slice | Int[Tensor, " pair"]:
    """Return evenly spaced coordinates as a slice, which reads and writes without an index."""
    numbers = coordinates.tolist()
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    spaced = range(numbers[0], numbers[-1] + 1, step) if numbers and step > 0 else range(0)
    return slice(spaced.start, spaced.stop, spaced.step) if [*spaced] == numbers else coordinates


@dataclass(frozen=True, kw_only=True, eq=False)
class ReaderSums(TensorRecord):
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
