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

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.analyses.jackknife import Interval, jackknife, rms
from nope_probe.analyses.pattern_rows import (
    NonRelativeRows,
    beyond_rounding,
    distance_sums,
    relative_fit,
)
from nope_probe.maps.centred import KeptCells, centred_rows
from nope_probe.maps.estimates import Estimates, ProductSums, fold_weights
from nope_probe.maps.folds import pooled
from nope_probe.maps.layers import LayerMaps, Question
from nope_probe.maps.positions import ReaderSums
from nope_probe.maps.rows import one_thread

MIN_FOLDS = 5  # four folds are multiplied, and one is left out
Side = Literal["key", "query"]
Vectors = Float[Tensor, "fold pos head d_head"]
Maps = Float[Tensor, "map row key_pos"]
Values = Float[
    Tensor, "map row column"
]  # patterns, whose columns are keys; or leads, in one column
PAIR_BYTES = 1 << 26  # maps of pairs of folds that are held at once
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
        rest: the mean square of a pattern's non-relative part; None for a lead.
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
            rest_crossed: the same of the non-relative parts of patterns.
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
        counts: sequences per fold.
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

    def __post_init__(self) -> None:
        if len(self.counts) < MIN_FOLDS:
            raise ValueError(
                f"expected {MIN_FOLDS} folds or more, got {len(self.counts)}: means of four "
                "folds are multiplied, and intervals leave one fold out"
            )

    def questions(self) -> Iterator[Reader]:
        """Yield the reader of the lead, where queries have one, and the reader of the pattern."""
        if self.maps.lead is not None:
            yield replace(self, question="lead")
        yield replace(self, question="pattern")

    def mean(self, x: Vectors) -> Vectors:
        """Return the mean over positions, at each position."""
        return x[:, self.kept_positions :].mean(1, keepdim=True).expand_as(x)

    def part(self, x: Vectors, which: Literal["all", "mean", "written"]) -> Vectors:
        """Return queries or keys, their mean over positions, or their difference from it."""
        return {"all": x, "mean": self.mean(x), "written": x - self.mean(x)}[which]

    def term(self, name: str) -> tuple[Vectors, Vectors]:
        """Return the queries and keys whose products are a term of the mean term."""
        q, k = PARTS[name]
        return self.part(self.sums.q, q), self.part(self.sums.k, k)

    @property
    def of_norm(self) -> tuple[Vectors, Vectors] | None:
        """The queries and keys whose products are the norms' own part of the written terms.

        Heads that stand side by side add up: all queries meet what the norms make of keys, and
        what they make of queries meets the mean key, as in `readings`.
        """
        sums = self.sums
        if sums.norm_queries is None or sums.norm_keys is None:
            return None
        queries, keys = (self.part(x, "written") for x in (sums.norm_queries, sums.norm_keys))
        return torch.cat((sums.q, queries), 2), torch.cat((keys, self.mean(sums.k)), 2)

    def turned(self, x: Vectors) -> Vectors:
        """Return queries or keys as RoPE turns them."""
        return x if self.sums.turns is None else self.sums.turns.turned(x)

    def turned_back(self, x: Float[Tensor, "*folds pos head d_head"]) -> Tensor:
        """Return turned vectors as at position 0."""
        return x if self.sums.turns is None else self.sums.turns.turned_back(x)

    @cached_property
    def weights(self) -> Float[Tensor, " fold"]:
        """The share of all sequences that each fold holds."""
        return fold_weights(len(self.counts), self.counts)

    @cached_property
    def maps(self) -> LayerMaps:
        """The scores as the maps of a layer."""
        where = self.sums.query_positions
        return LayerMaps.of(self.scores, self.counts, where, self.skip_keys)

    @cached_property
    def cells(self) -> KeptCells:
        """The cells of the pattern."""
        return self.maps.pattern.cells

    @cached_property
    def lead_weights(self) -> Float[Tensor, "row key_pos"]:
        """The weight of each cell in its row's lead: 1/k at k first keys, -1/n at n others."""
        lead, others = self.maps.lead, self.cells.mask.double()
        assert lead is not None
        weights = -others / others.sum(1, keepdim=True).clamp_min(1)
        weights[:, : self.skip_keys] = 1 / self.skip_keys
        return weights * torch.isin(self.cells.query_positions, lead.queries)[:, None]

    @cached_property
    def n_values(self) -> int:
        """How many queries have a lead, or cells a pattern: products are means over them."""
        lead = self.maps.lead
        return self.cells.count if self.question == "pattern" or lead is None else len(lead.queries)

    def values_of(self, maps: Maps) -> Values:
        """Return the patterns of maps, 0 outside their cells, or their leads as one column."""
        if self.question == "pattern":
            return centred_rows(maps, self.cells.mask)
        weights = self.lead_weights
        return (maps.where(weights != 0, 0.0) * weights).sum(-1, keepdim=True)

    def target(self, values: Values) -> Maps:
        """Return W, such that <T, V> is the sum over cells of T times W, for the map T of a term.

        Args:
            values: V, patterns or leads.
        """
        values = values / self.n_values
        return values if self.question == "pattern" else values * self.lead_weights

    def at_rows(self, x: Vectors) -> Float[Tensor, "fold row head d_head"]:
        """Return the queries that have rows, as RoPE turns them."""
        return self.turned(x)[:, self.cells.query_positions]

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
        kept = self.scores.where(self.cells.mask, 0.0)
        square = (kept.square().sum((1, 2)) / self.cells.count).mean()
        if self.question == "pattern":
            return square
        return square + (self.values.square().sum((1, 2)) / self.n_values).mean()

    def non_relative(self, patterns: Maps) -> Maps:
        """Return patterns less their projection on a(i) + f(i - j), 0 outside the kept cells."""
        by_distance = sum(
            (self._distance_sums(*block) for block in self._blocks(patterns)), torch.zeros(())
        )
        fit, rest, row = NonRelativeRows(by_distance, self.cells), torch.zeros_like(patterns), 0
        for start, stop in self.cells.where.blocks(len(patterns), PAIR_BYTES):
            rows = slice(row, row + stop - start)
            rest[:, rows, :stop] = fit.of(patterns[:, rows, :stop], start)
            row = rows.stop
        return rest

    def mean_map(self, q: Vectors, k: Vectors) -> Float[Tensor, "row key_pos"]:
        """Return <R_i q_i, R_j k_j> of the means over all sequences, nats."""
        left, right = (
            pooled(x.double(), self.counts).flatten(1) for x in (self.at_rows(q), self.turned(k))
        )
        return left @ right.T * self.sums.scale

    def with_lead(self, scores: Float[Tensor, "row key_pos"]) -> Float[Tensor, "row key_pos"]:
        """Return the pattern in a map, whose first column is the lead; see `Pattern.with_lead`."""
        pattern, blocks = self.maps.pattern, [*self.cells.where.blocks(1, PAIR_BYTES)]
        rows = zip(scores.split([stop - start for start, stop in blocks]), blocks, strict=True)
        return torch.cat([pattern.with_lead(of_block, start) for of_block, (start, _) in rows])

    def products(self, q: Vectors, k: Vectors, values: Values) -> Estimates:
        """Return <T(q, k), V> of queries, keys and the lead or pattern V of each fold."""
        left, right = (x.double().flatten(2) for x in (self.at_rows(q), self.turned(k)))
        through = torch.einsum("cij,bjx->cbix", self.target(values), right)
        triples = torch.einsum("aix,cbix->abc", left, through)
        return self._over_triples(triples * self.sums.scale)

    def readings(self, side: Side) -> Float[Tensor, "a c pos head d_head"]:
        """Return the gradient of <T, V> in a key (query), for every pair of other folds.

        Keys meet the whole queries E q_i, but queries meet only k0, so that position in both sides
        is counted once, with the keys.
        """
        if side == "key":
            met = self.at_rows(self.part(self.sums.q, "all")).double()
        else:
            met = self.turned(self.mean(self.sums.k)).double()
        n_folds, _, *shape = met.shape
        readings = met.new_zeros(n_folds, n_folds, self.cells.n, *shape)
        for fold, target in enumerate(self.target(self.values)):
            if side == "key":
                of_fold = torch.einsum("ij,aihd->ajhd", target, met)
            else:
                of_fold = met.new_zeros(n_folds, self.cells.n, *shape)
                at_rows = torch.einsum("ij,ajhd->aihd", target, met)
                of_fold[:, self.cells.query_positions] = at_rows
            readings[:, fold] = self.turned_back(of_fold) * self.sums.scale
        return readings

    def written_products(self, readings: Tensor, x: Vectors) -> Estimates:
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
        return beyond_rounding(self.size_of(self.values).square, self.score_square)

    def size_of(self, values: Values) -> Size:
        """Return the size of the leads or patterns of fold maps."""
        if self.question == "pattern":
            squares = [self._over_folds(gram) for gram in self._grams(self._blocks(values))]
            return Size(square=squares[0], rest=squares[1])
        leads = values.flatten(1)
        means = Estimates.of_means(leads.sum(1) / self.n_values, self.weights)
        return Size(square=self._over_folds(leads @ leads.T), mean=means)

    def pair_size(self, q: Vectors, k: Vectors, *, non_relative: bool = True) -> Size:
        """Return the size of the lead or pattern of <R_i q_i, R_j k_j>.

        Queries and keys come from different folds, so a square takes four different folds.

        Args:
            q: queries.
            k: keys.
            non_relative: whether to measure a pattern's non-relative part.
        """
        if self.question == "lead":
            leads = self._pair_leads(q, k)
            return Size(
                square=self._over_quads(leads @ leads.T), mean=self._over_pairs(leads.sum(1))
            )
        if non_relative:
            grams = self._grams(self._pair_blocks(q, k))
            square, rest = (self._over_quads(gram) for gram in grams)
            return Size(square=square, rest=rest)
        gram = torch.zeros(())
        for _, maps in self._pair_blocks(q, k):
            gram = gram + maps.flatten(1) @ maps.flatten(1).T
        return Size(square=self._over_quads(gram))

    def _over_folds(self, gram: Float[Tensor, "fold fold2"]) -> Estimates:
        return ProductSums(gram[None, :, None]).product(self.n_values, self.weights)

    def _over_pairs(self, sums: Float[Tensor, " pair"]) -> Estimates:
        values = _pair_weights(self.weights) @ sums
        return Estimates(values=values / self.n_values, weights=self.weights)

    def _over_quads(self, gram: Float[Tensor, "pair pair2"]) -> Estimates:
        values = torch.einsum("fxy,xy->f", _quad_weights(self.weights), gram)
        return Estimates(values=values / self.n_values, weights=self.weights)

    def _pair_leads(self, q: Vectors, k: Vectors) -> Float[Tensor, "pair row"]:
        """Return the leads of <R_i q_i, R_j k_j> for all pairs of folds.

        A row's lead is the product with the keys' sum, weighted as in the lead.
        """
        left, right = (x.double().flatten(2) for x in (self.at_rows(q), self.turned(k)))
        met = torch.einsum("ij,fjx->fix", self.lead_weights, right) * self.sums.scale
        first, second = _pairs(len(left)).T
        return torch.einsum("aix,bix->abi", left, met)[first, second]

    def _pair_blocks(self, q: Vectors, k: Vectors) -> Iterator[tuple[slice, Maps]]:
        """Yield the patterns of <R_i q_i, R_j k_j> for all pairs of folds, by blocks of rows.

        A row's mean over its kept keys is the product with the mean of these keys.
        """
        left, right = (x.double().flatten(2) for x in (self.at_rows(q), self.turned(k)))
        left = left * self.sums.scale
        queries, sums = self.cells.query_positions, pad(right.cumsum(1), (0, 0, 1, 0))
        firsts = self.cells.first[queries]
        n_keys = self.cells.n_keys[queries, None].clamp_min(1)
        means = (sums[:, queries] - sums[:, firsts]) / n_keys
        pairs = _pairs(len(left)).tolist()
        for rows, stop in self._row_blocks(len(pairs)):
            products = left.new_empty(len(pairs), rows.stop - rows.start, stop)
            for product, (one, other) in zip(products, pairs, strict=True):
                torch.mm(left[one, rows], right[other, :stop].T, out=product)
                product -= (left[one, rows] * means[other, rows]).sum(1, keepdim=True)
            products *= self.cells.mask[rows, :stop]
            yield rows, products

    def _blocks(self, patterns: Maps) -> Iterator[tuple[slice, Maps]]:
        for rows, stop in self._row_blocks(len(patterns)):
            yield rows, patterns[:, rows, :stop]

    def _row_blocks(self, n_maps: int) -> Iterator[tuple[slice, int]]:
        """Yield blocks of rows, with the number of keys up to the last of their queries."""
        queries, n = self.cells.query_positions, self.cells.n
        size = max(1, PAIR_BYTES // (8 * n_maps * n))
        with one_thread() if len(queries) < n else nullcontext():
            for start in range(0, len(queries), size):
                rows = slice(start, min(start + size, len(queries)))
                yield rows, int(queries[rows.stop - 1]) + 1

    def _distance_sums(self, rows: slice, maps: Maps) -> Float[Tensor, "map distance"]:
        """Return the sums over the cells of every distance in a block of rows."""
        queries = self.cells.query_positions[rows]
        if len(queries) > int(queries[-1] - queries[0]):
            return distance_sums(maps, int(queries[0]), self.cells.n)
        sums = maps.new_zeros(len(maps), self.cells.n)
        for row, query in enumerate(queries.tolist()):
            sums[:, : query + 1] += maps[:, row, : query + 1].flip(-1)
        return sums

    def _grams(
        self, blocks: Iterable[tuple[slice, Maps]]
    ) -> tuple[Float[Tensor, "map map2"], Float[Tensor, "map map2"]]:
        """Return the inner products of patterns, and of their non-relative parts.

        A pattern has rows of mean 0, so its product with the projection of another pattern on
        a(i) + f(i - j) needs only f and the pattern's sums over each distance.
        """
        gram, by_distance = torch.zeros(()), torch.zeros(())
        for rows, maps in blocks:
            cells = maps.flatten(1)
            gram = gram + cells @ cells.T
            by_distance = by_distance + self._distance_sums(rows, maps)
        _, f = relative_fit(by_distance, self.cells)
        return gram, gram - f @ by_distance.T


def _pairs(n_folds: int) -> Int[Tensor, "pair two"]:
    return (~torch.eye(n_folds, dtype=torch.bool)).nonzero()


def _without_each(weights: Float[Tensor, " fold"]) -> Float[Tensor, "one_plus_folds fold"]:
    """Return the weights of all folds, then the weights with every fold in turn at 0."""
    n = len(weights)
    keep = torch.cat((torch.ones(1, n, dtype=weights.dtype), 1 - torch.eye(n, dtype=weights.dtype)))
    return keep * weights


def _triple_weights(weights: Float[Tensor, " fold"]) -> Float[Tensor, "one_plus_folds a b c"]:
    w, other = _without_each(weights), (~torch.eye(len(weights), dtype=torch.bool)).double()
    different = torch.einsum("ab,bc,ac->abc", other, other, other)
    return _normalised(torch.einsum("fa,fb,fc->fabc", w, w, w) * different)


def _pair_weights(weights: Float[Tensor, " fold"]) -> Float[Tensor, "one_plus_folds pair"]:
    first, second = _pairs(len(weights)).T
    each = _without_each(weights)
    return _normalised(each[:, first] * each[:, second])


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
