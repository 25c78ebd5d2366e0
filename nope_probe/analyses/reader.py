"""The mean queries and keys of a reader, and products of their patterns between folds.

Before RoPE a layer's mean query and key at a position are E q_i = q0 + dq_i and E k_j = k0 + dk_j,
with q0 and k0 the means over positions. R_i is RoPE's rotation at position i.

Products take the means of queries, keys and maps from different folds, so that noise does not count
as pattern: three folds for a share, four for a mean square.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.analyses.jackknife import Interval, share
from nope_probe.analyses.pattern_rows import (
    NonRelativeRows,
    beyond_rounding,
    distance_sums,
    names_of_parts,
    relative_fit,
)
from nope_probe.maps.centred import KeptCells, centred_rows, first_visible_keys
from nope_probe.maps.estimates import Estimates, ProductSums, fold_weights
from nope_probe.maps.folds import pooled
from nope_probe.maps.positions import ReaderSums
from nope_probe.maps.rows import MapRows, one_thread

MIN_FOLDS = 5  # four folds are multiplied, and one is left out
Side = Literal["key", "query"]
Vectors = Float[Tensor, "fold pos head d_head"]
Maps = Float[Tensor, "map row key_pos"]
PAIR_BYTES = 1 << 26  # maps of pairs of folds that are held at once
PARTS: dict[str, tuple[Literal["all", "mean", "written"], Literal["all", "mean", "written"]]] = {
    "rotation": ("mean", "mean"),
    "written_key": ("mean", "written"),
    "written_query": ("written", "mean"),
    "written_both": ("written", "written"),
    "mean": ("all", "all"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Squares:
    """Mean squares of a pattern and of its non-relative part, squared nats."""

    whole: Estimates
    rest: Estimates


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """The mean queries and keys of one layer or head, about their means over positions.

    Attributes:
        sums: fold means of its queries and keys.
        counts: sequences per fold.
        skip_keys: how many first positions the pattern and the means over positions leave out.
        apart: how many first keys stand apart in shares, which then have two parts.
    """

    sums: ReaderSums
    counts: Int[Tensor, " fold"]
    skip_keys: int = 0
    apart: int = 0

    def __post_init__(self) -> None:
        if len(self.counts) < MIN_FOLDS:
            raise ValueError(
                f"expected {MIN_FOLDS} folds or more, got {len(self.counts)}: means of four "
                "folds are multiplied, and intervals leave one fold out"
            )

    def mean(self, x: Vectors) -> Vectors:
        """Return the mean over the kept positions, at each position."""
        return x[:, self.skip_keys :].mean(1, keepdim=True).expand_as(x)

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
    def cells(self) -> KeptCells:
        """The cells of the pattern."""
        return self._cells_from(self.skip_keys)

    def _cells_from(self, first: int) -> KeptCells:
        where = MapRows.of(self.sums.scores, self.sums.query_positions)
        return KeptCells.of(first_visible_keys(self.sums.scores[0], where), first, where)

    def at_rows(self, x: Vectors) -> Float[Tensor, "fold row head d_head"]:
        """Return the queries that have rows, as RoPE turns them."""
        return self.turned(x)[:, self.cells.query_positions]

    @cached_property
    def scores(self) -> Float[Tensor, "fold row key_pos"]:
        """The fold means of the scores, with a bias that is added to them, nats."""
        bias = self.sums.bias
        return (self.sums.scores if bias is None else self.sums.scores + bias).double()

    @cached_property
    def patterns(self) -> Float[Tensor, "fold row key_pos"]:
        """The pattern of each fold, 0 outside the kept cells."""
        return self.pattern_of(self.scores)

    @cached_property
    def patterns_of_others(self) -> Float[Tensor, "fold row key_pos"]:
        """The part of each fold's pattern among the other keys, 0 at the first keys."""
        if self.apart <= self.skip_keys:
            return self.patterns
        return centred_rows(self.scores, self._cells_from(self.apart).mask)

    def shares(self, of_whole: Estimates, of_others: Estimates) -> dict[str, Interval]:
        """Return the share of a term T, and what the first and the other keys bring of it.

        Args:
            of_whole: <T, V>.
            of_others: <T, V> with the part of V among the other keys.
        """
        products = (of_whole, of_whole - of_others, of_others)
        names = names_of_parts("share")
        return {name: share(x, self.square) for name, x in zip(names, products, strict=True)}

    @cached_property
    def score_square(self) -> Float[Tensor, ""]:
        """The mean square of the scores, squared nats; patterns within rounding are 0."""
        kept = self.scores.where(self.cells.mask, 0.0)
        return (kept.square().sum((1, 2)) / self.cells.count).mean()

    def pattern_of(self, maps: Maps) -> Maps:
        """Return maps less each row's mean over the kept cells, 0 outside of them."""
        return centred_rows(maps, self.cells.mask)

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
        """Return the pattern of <R_i q_i, R_j k_j> over all sequences, nats; NaN elsewhere."""
        left, right = (
            pooled(x.double(), self.counts).flatten(1) for x in (self.at_rows(q), self.turned(k))
        )
        pattern = self.pattern_of((left @ right.T * self.sums.scale)[None])[0]
        return pattern.where(self.cells.mask, torch.nan)

    def products(
        self, q: Vectors, k: Vectors, patterns: Float[Tensor, "fold row key_pos"]
    ) -> Estimates:
        """Return <T(q, k), V>, a mean over cells, of queries, keys and a pattern."""
        left, right = (x.double().flatten(2) for x in (self.at_rows(q), self.turned(k)))
        through = torch.einsum("cij,bjx->cbix", patterns, right)
        triples = torch.einsum("aix,cbix->abc", left, through)
        return self._over_triples(triples * self.sums.scale)

    def readings(
        self, side: Side, patterns: Float[Tensor, "fold row key_pos"]
    ) -> Float[Tensor, "a c pos head d_head"]:
        """Return the gradient of <T, V> in a key (query), for every pair of other folds.

        Keys meet the whole queries E q_i, but queries meet only k0, so that position in both sides
        is counted once, with the keys.

        Args:
            side: keys or queries.
            patterns: V, the pattern of each fold or its part among the other keys.
        """
        if side == "key":
            met = self.at_rows(self.part(self.sums.q, "all")).double()
        else:
            met = self.turned(self.mean(self.sums.k)).double()
        n_folds, _, *shape = met.shape
        readings = met.new_zeros(n_folds, n_folds, self.cells.n, *shape)
        for fold, pattern in enumerate(patterns):
            if side == "key":
                of_fold = torch.einsum("ij,aihd->ajhd", pattern, met)
            else:
                of_fold = met.new_zeros(n_folds, self.cells.n, *shape)
                at_rows = torch.einsum("ij,ajhd->aihd", pattern, met)
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
        return Estimates(values=values / self.cells.count, weights=self.weights)

    @cached_property
    def square(self) -> Estimates:
        """<V, V>, squared nats; 0 within rounding."""
        return beyond_rounding(self.pattern_squares(self.patterns).whole, self.score_square)

    def pattern_squares(self, patterns: Float[Tensor, "fold row key_pos"]) -> Squares:
        """Return <P, P> of patterns and of their non-relative parts, between different folds."""
        sums = []
        for gram in self._grams(self._blocks(patterns)):
            products = ProductSums(gram[None, :, None])
            sums.append(products.product(self.cells.count, self.weights))
        return Squares(whole=sums[0], rest=sums[1])

    def pair_squares(self, q: Vectors, k: Vectors) -> Squares:
        """Return <T, T> of the patterns T of <R_i q_i, R_j k_j>, and of their non-relative parts.

        Queries and keys come from different folds, so a product takes four different folds.
        """
        whole, rest = (self._over_quads(gram) for gram in self._grams(self._pair_blocks(q, k)))
        return Squares(whole=whole, rest=rest)

    def pair_square(self, q: Vectors, k: Vectors) -> Estimates:
        """Return <T, T> as `pair_squares` does, without the non-relative parts."""
        gram = torch.zeros(())
        for _, maps in self._pair_blocks(q, k):
            gram = gram + maps.flatten(1) @ maps.flatten(1).T
        return self._over_quads(gram)

    def _over_quads(self, gram: Float[Tensor, "pair pair2"]) -> Estimates:
        values = torch.einsum("fxy,xy->f", _quad_weights(self.weights), gram)
        return Estimates(values=values / self.cells.count, weights=self.weights)

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


def _quad_weights(weights: Float[Tensor, " fold"]) -> Float[Tensor, "one_plus_folds pair pair2"]:
    first, second = _pairs(len(weights)).T
    pair = _without_each(weights)[:, first] * _without_each(weights)[:, second]
    shared = torch.zeros(len(first), len(first), dtype=torch.bool)
    for one in (first, second):
        for other in (first, second):
            shared |= one[:, None] == other[None]
    return _normalised(torch.einsum("fx,fy->fxy", pair, pair) * ~shared)


def _normalised(weights: Float[Tensor, "one_plus_folds *folds"]) -> Tensor:
    return weights / weights.flatten(1).sum(1).view(-1, *[1] * (weights.ndim - 1))
