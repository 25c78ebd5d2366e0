"""The mean queries and keys of a reader, and products of their leads and patterns between folds.

Before RoPE a layer's mean query and key at a position are E q_i = q0 + dq_i and E k_j = k0 + dk_j,
with q0 and k0 the means over positions. R_i is RoPE's rotation at position i.

The lead of the first key and the pattern among the other keys are linear in a row's scores. So the
product <T, V> of a term's lead or pattern with that of the scores, V, is the sum over cells of the
term times a map W, and a reader answers both questions in one way.

Products take the means of queries, keys and maps from different folds, so that noise does not count
as pattern: three folds for a share, four for a mean square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, jackknife, rms
from nope_probe.analyses.pattern_rows import (
    PatternSums,
    beyond_rounding,
    mean_squares,
)
from nope_probe.maps.estimates import Estimates, weights_of_means
from nope_probe.maps.folds import pooled
from nope_probe.maps.layers import LayerMaps, Lead, Pattern, Question
from nope_probe.maps.positions import ReaderSums
from nope_probe.maps.rows import centred_rows

PAIR_BYTES = 1 << 24  # maps of pairs of folds at once
Side = Literal["key", "query"]
FoldVectors = Float[Tensor, "fold pos head d_head"]
ScoreRows = Float[Tensor, "map row key_pos"]
CellValues = Float[
    Tensor, "map row column"
]  # patterns, whose columns are keys; or leads, in one column
PARTS: dict[str, tuple[Literal["all", "mean", "written"], Literal["all", "mean", "written"]]] = {
    "rotation": ("mean", "mean"),
    "written_key": ("mean", "written"),
    "written_query": ("written", "mean"),
    "written_both": ("written", "written"),
    "mean": ("all", "all"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Size:
    """Estimates of how large a lead or a pattern is.

    Attributes:
        square: its mean square, squared nats.
        mean: the mean of a lead over queries, nats; None for a pattern.
        rest: the mean square of a pattern's part not by distance; None for a lead.
    """

    square: Estimates
    mean: Estimates | None = None
    rest: Estimates | None = None

    @property
    def nats(self) -> Interval:
        """The mean of a lead, or the RMS of a pattern; 0 where the square is 0."""
        if self.mean is None:
            return rms(self.square)
        return jackknife(self.mean * float(self.square.values.any()))

    def less(self, part: Size, crossed: Estimates, rest_crossed: Estimates | None) -> Size:
        """Return the size of the whole less a part.

        Args:
            part: the size of the part.
            crossed: <part, whole>.
            rest_crossed: the same of the parts of patterns that are not by distance.
        """
        mean = None if self.mean is None or part.mean is None else self.mean - part.mean
        rest = None
        if self.rest is not None and part.rest is not None and rest_crossed is not None:
            rest = self.rest + part.rest - 2.0 * rest_crossed
        square = self.square + part.square - 2.0 * crossed
        return Size(square=square, mean=mean, rest=rest)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """The mean queries and keys of one layer or head, about their means over positions.

    Attributes:
        sums: fold means of its queries and keys.
        counts: sequences per fold, of `PRODUCT_FOLDS` folds or more.
        skip_keys: how many keys count as first.
        kept_positions: how many first positions the means over positions leave out, because what is
            written there is never taken away.
        question: whether products and sizes are of the lead of the first key, or of the pattern
            among the other keys.
    """

    sums: ReaderSums
    counts: Int[Tensor, " fold"]
    skip_keys: int = 0
    kept_positions: int = 0
    question: Question = "pattern"

    def questions(self) -> Iterator[Reader]:
        """Yield the reader of the lead, where queries have one, and the reader of the pattern."""
        if self.pattern.lead is not None:
            yield replace(self, question="lead")
        yield replace(self, question="pattern")

    def mean(self, x: FoldVectors) -> FoldVectors:
        """Return the mean over positions, at each position."""
        return x[:, self.kept_positions :].mean(1, keepdim=True).expand_as(x)

    def part(self, x: FoldVectors, which: Literal["all", "mean", "written"]) -> FoldVectors:
        """Return queries or keys, their mean over positions, or their difference from it."""
        return {"all": x, "mean": self.mean(x), "written": x - self.mean(x)}[which]

    def term(self, name: str) -> tuple[FoldVectors, FoldVectors]:
        """Return the queries and keys whose products are a term of the mean term."""
        q, k = PARTS[name]
        return self.part(self.sums.q, q), self.part(self.sums.k, k)

    @property
    def of_norm(self) -> tuple[FoldVectors, FoldVectors] | None:
        """The queries and keys whose products are the norms' part of the written terms.

        The products of the two halves of heads add up: all queries with the norms' part of the
        keys, and the norms' part of the queries with the mean key, as in `readings`.
        """
        sums = self.sums
        if sums.norm_queries is None or sums.norm_keys is None:
            return None
        queries, keys = (self.part(x, "written") for x in (sums.norm_queries, sums.norm_keys))
        return torch.cat((sums.q, queries), 2), torch.cat((keys, self.mean(sums.k)), 2)

    @cached_property
    def maps(self) -> LayerMaps:
        """The scores as the maps of a layer."""
        where = self.sums.query_positions
        return LayerMaps.of(self.scores, self.counts, where, self.skip_keys)

    @cached_property
    def pattern(self) -> Pattern:
        """The pattern of the scores, which has their lead."""
        return self.maps.pattern

    def pattern_of(self, maps: ScoreRows) -> Pattern:
        """Return the pattern of maps of the layer, in the cells of the scores' pattern."""
        return replace(self.pattern, maps=LayerMaps.of(maps, None, self.maps.queries))

    @property
    def weights(self) -> Float[Tensor, " fold"]:
        """The share of all sequences that each fold holds."""
        return self.maps.weights

    @cached_property
    def lead(self) -> Lead | None:
        """The lead that the reader is asked about; None for a reader of the pattern."""
        return self.pattern.lead if self.question == "lead" else None

    @property
    def n_values(self) -> int:
        """How many queries have a lead, or cells a pattern: products are means over them."""
        return self.pattern.cells.count if self.lead is None else len(self.lead.queries)

    def values_of(self, maps: ScoreRows) -> CellValues:
        """Return the patterns of maps, 0 outside their cells, or their leads as one column."""
        if self.lead is None:
            return centred_rows(maps, self.pattern.cells.mask)
        weights = self.lead.weights
        return (maps.where(weights != 0, 0.0) * weights).sum(-1, keepdim=True)

    def target(self, values: CellValues) -> ScoreRows:
        """Return W, such that <T, V> is the sum over cells of T times W, for the map T of a term.

        Args:
            values: V, patterns or leads.
        """
        values = values / self.n_values
        return values if self.lead is None else values * self.lead.weights

    def at_rows(self, x: FoldVectors) -> Float[Tensor, "fold row head d_head"]:
        """Return the queries that have rows, as RoPE turns them."""
        return self.sums.rotation.turned(x)[:, self.maps.queries]

    def factors(
        self, q: FoldVectors, k: FoldVectors
    ) -> tuple[Float[Tensor, "fold row width"], Float[Tensor, "fold key_pos width"]]:
        """Return R_i q_i of the rows, times the scale, and R_j k_j: their products are scores."""
        left, right = (
            x.double().flatten(2) for x in (self.at_rows(q), self.sums.rotation.turned(k))
        )
        return left * self.sums.scale, right

    @cached_property
    def scores(self) -> Float[Tensor, "fold row key_pos"]:
        """The fold means of the scores, with a bias that is added to them, nats."""
        bias = self.sums.bias
        return (self.sums.scores if bias is None else self.sums.scores + bias).double()

    @cached_property
    def values(self) -> Float[Tensor, "fold row column"]:
        """V, the lead or the pattern of each fold."""
        return self.values_of(self.scores)

    @cached_property
    def score_square(self) -> Float[Tensor, ""]:
        """The mean square of the scores, squared nats; leads and patterns within rounding are 0."""
        cells = self.pattern.cells
        squares = [
            mean_squares(block.scores, block.start, cells).mean() for block in self.pattern.blocks()
        ]
        if self.lead is not None:
            squares.append(self.values.square().sum((1, 2)).mean() / self.n_values)
        return torch.stack(squares).sum()

    def mean_map(self, q: FoldVectors, k: FoldVectors) -> Float[Tensor, "row key_pos"]:
        """Return <R_i q_i, R_j k_j> of the means over all sequences, nats."""
        left, right = (pooled(x, self.counts) for x in self.factors(q, k))
        return left @ right.T

    def products(self, q: FoldVectors, k: FoldVectors, values: CellValues) -> Estimates:
        """Return <T(q, k), V> of queries, keys and the lead or pattern V of each fold."""
        left, right = self.factors(q, k)
        through = torch.einsum("cij,bjx->cbix", self.target(values), right)
        return self._over_triples(torch.einsum("aix,cbix->abc", left, through))

    def readings(self, side: Side) -> Float[Tensor, "a c pos head d_head"]:
        """Return the gradient of <T, V> in a key (query), for every pair of other folds.

        Keys are multiplied by the whole queries E q_i, but queries only by k0. So position in both
        is counted once, with the keys.
        """
        if side == "key":
            met = self.at_rows(self.sums.q).double()
        else:
            met = self.sums.rotation.turned(self.mean(self.sums.k)).double()
        n_folds, _, *shape = met.shape
        readings = met.new_zeros(n_folds, n_folds, self.maps.n, *shape)
        for fold, target in enumerate(self.target(self.values)):
            if side == "key":
                of_fold = torch.einsum("ij,aihd->ajhd", target, met)
            else:
                of_fold = met.new_zeros(n_folds, self.maps.n, *shape)
                of_fold[:, self.maps.queries] = torch.einsum("ij,ajhd->aihd", target, met)
            readings[:, fold] = self.sums.rotation.turned_back(of_fold) * self.sums.scale
        return readings

    def written_products(self, readings: Tensor, x: FoldVectors) -> Estimates:
        """Return <T, V> of a writer's part of keys or queries, less its mean over positions.

        Args:
            readings: the result of `readings` for that side.
            x: fold means of the writer's part.
        """
        written = self.part(x, "written").double()
        return self._over_triples(torch.einsum("acjhd,bjhd->abc", readings, written))

    def _over_triples(self, triples: Float[Tensor, "a b c"]) -> Estimates:
        values = torch.einsum("fabc,abc->f", _triple_weights(self.weights), triples)
        return Estimates(values=values, weights=self.weights)

    @cached_property
    def square(self) -> Estimates:
        """<V, V>, squared nats; 0 within rounding."""
        return beyond_rounding(self.size_of(self.scores).square, self.score_square)

    def size_of(self, maps: ScoreRows) -> Size:
        """Return the size of the leads or patterns of fold maps, nats."""
        if self.lead is None:
            sums = PatternSums(self.pattern.cells)
            for block in self.pattern_of(maps).blocks():
                sums.add(block.rows, block.queries)
            square, rest = map(self.pattern.estimates, sums.grams)
            return Size(square=square, rest=rest)
        leads = self.values_of(maps).flatten(1)
        means = Estimates.of_means(leads.sum(1) / self.n_values, self.weights)
        square = Estimates.of_square(leads @ leads.T, self.n_values, self.weights)
        return Size(square=square, mean=means)

    def pair_size(self, q: FoldVectors, k: FoldVectors) -> Size:
        """Return the size of the lead or pattern of <R_i q_i, R_j k_j>.

        Queries and keys come from different folds, so a square takes four different folds.
        """
        if self.lead is None:
            square, rest = map(self._over_quads, self._pair_sums(q, k).grams)
            return Size(square=square, rest=rest)
        # A row's lead is the product with the keys' sum, weighted as in the lead.
        left, right = self.factors(q, k)
        met = torch.einsum("ij,fjx->fix", self.lead.weights, right)
        first, second = _pairs(len(left)).T
        leads = torch.einsum("aix,bix->abi", left, met)[first, second]
        means = _pair_weights(self.weights) @ leads.sum(1) / self.n_values
        mean = Estimates(values=means, weights=self.weights)
        return Size(square=self._over_quads(leads @ leads.T), mean=mean)

    def _over_quads(self, gram: Float[Tensor, "pair pair2"]) -> Estimates:
        values = torch.einsum("fxy,xy->f", _quad_weights(self.weights), gram)
        return Estimates(values=values / self.n_values, weights=self.weights)

    def _pair_sums(self, q: FoldVectors, k: FoldVectors) -> PatternSums:
        """Return the sums of the patterns of <R_i q_i, R_j k_j> for all pairs of folds."""
        left, right = self.factors(q, k)
        (first, second), cells = _pairs(len(left)).T, self.pattern.cells
        sums, size = PatternSums(cells), max(1, PAIR_BYTES // (8 * len(first) * cells.n))
        for rows in torch.arange(len(self.maps.queries)).split(size):
            queries = self.maps.queries[rows]
            stop = int(queries[-1]) + 1
            products = torch.stack([left[:, rows] @ keys[:stop].T for keys in right], 1)
            kept = cells.of_queries(queries, stop)
            sums.add(centred_rows(products[first, second], kept), queries)
        return sums


def _pairs(n_folds: int) -> Int[Tensor, "pair two"]:
    return (~torch.eye(n_folds, dtype=torch.bool)).nonzero()


def _triple_weights(weights: Float[Tensor, " fold"]) -> Float[Tensor, "one_plus_folds a b c"]:
    n_folds = len(weights)
    w, other = weights_of_means(weights)[: n_folds + 1], 1 - torch.eye(n_folds, dtype=weights.dtype)
    different = torch.einsum("ab,bc,ac->abc", other, other, other)
    return _normalised(torch.einsum("fa,fb,fc->fabc", w, w, w) * different)


def _pair_weights(weights: Float[Tensor, " fold"]) -> Float[Tensor, "one_plus_folds pair"]:
    first, second = _pairs(len(weights)).T
    w = weights_of_means(weights)[: len(weights) + 1]
    return _normalised(w[:, first] * w[:, second])


def _quad_weights(weights: Float[Tensor, " fold"]) -> Float[Tensor, "one_plus_folds pair pair2"]:
    first, second = _pairs(len(weights)).T
    pair = _pair_weights(weights)
    shared = torch.zeros(len(first), len(first), dtype=torch.bool)
    for one in (first, second):
        for other in (first, second):
            shared |= one[:, None] == other[None]
    return _normalised(torch.einsum("fx,fy->fxy", pair, pair) * ~shared)


def _normalised(weights: Float[Tensor, "one_plus_folds *folds"]) -> Tensor:
    return weights / weights.flatten(1).sum(1).view(-1, *[1] * (weights.ndim - 1))
