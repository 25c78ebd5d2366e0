"""Exact splits of a layer's pattern: rotation, written position, and its writers.

Before RoPE a layer's mean query and key at a position are E q_i = q0 + dq_i and E k_j = k0 + dk_j,
with q0 and k0 the means over positions. R_i is RoPE's rotation at position i. The mean term of the
scores then has four parts: rotation <R_i q0, R_j k0>, the position in keys <R_i q0, R_j dk_j>, the
position in queries <R_i dq_i, R_j k0>, and both <R_i dq_i, R_j dk_j>. dq and dk are sums over
writers, and so are the last three parts.

Products take the means of queries, keys and maps from different folds, so that noise does not count
as pattern: three folds for a share, four for a mean square.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.analyses.jackknife import UNDEFINED, Interval, rms, share
from nope_probe.analyses.pattern_rows import (
    NonRelativeRows,
    beyond_rounding,
    distance_sums,
    names_of_parts,
    relative_fit,
)
from nope_probe.maps.centred import KeptCells, centred_rows
from nope_probe.maps.estimates import Estimates, ProductSums, fold_weights
from nope_probe.maps.folds import pooled
from nope_probe.maps.positions import PositionSums, ReaderSums
from nope_probe.maps.rows import MapRows, one_thread

MIN_FOLDS = 5  # four folds are multiplied, and one is left out
TERMS = ("rotation", "written_key", "written_query", "written_both")
Side = Literal["key", "query"]
Vectors = Float[Tensor, "fold pos head d_head"]
Maps = Float[Tensor, "map row key_pos"]
PAIR_BYTES = 1 << 26  # maps of pairs of folds that are held at once


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
        q, k = _PARTS[name]
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
        return KeptCells.of_maps(self.sums.scores, first, where)

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


_PARTS: dict[str, tuple[Literal["all", "mean", "written"], Literal["all", "mean", "written"]]] = {
    "rotation": ("mean", "mean"),
    "written_key": ("mean", "written"),
    "written_query": ("written", "mean"),
    "written_both": ("written", "written"),
    "mean": ("all", "all"),
}


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of a layer's (or head's) pattern.

    Attributes:
        rms: RMS of the term's pattern, nats.
        share: share of the whole pattern, <term, V> / <V, V>.
        share_first, share_others: what the two parts of the pattern bring of the share.
        relative_r2: share of the term's square that has the form a(i) + f(i - j).
        non_relative: RMS of the rest, nats.
    """

    rms: Interval
    share: Interval
    share_first: Interval
    share_others: Interval
    relative_r2: Interval
    non_relative: Interval


def position_terms(reader: Reader) -> dict[str, Term]:
    """Return the terms of a pattern: the whole, the mean term and its four parts, and the rest.

    The four shares add up to the mean term's share; with the covariance term (and ALiBi), to 1.
    `norm` is a part of the written terms: what the norms make of vectors that know nothing of
    position, because their mean scale depends on the position.
    """
    whole, of_whole = reader.square, reader.pattern_squares(reader.patterns)
    of_others = reader.pattern_squares(reader.patterns_of_others).whole
    products, squares = {"all": whole}, {"all": of_whole}
    others = {"all": beyond_rounding(of_others, reader.score_square)}
    pairs = {name: reader.term(name) for name in _PARTS}
    if reader.of_norm is not None:
        pairs["norm"] = reader.of_norm
    for name, (q, k) in pairs.items():
        products[name] = reader.products(q, k, reader.patterns)
        others[name] = reader.products(q, k, reader.patterns_of_others)
        squares[name] = reader.pair_squares(q, k)
    for of_part in (products, others):
        of_part["covariance"] = of_part["all"] - of_part["mean"]
    without_bias = reader.pattern_of(reader.sums.scores.double())
    of_scores, of_mean = reader.pattern_squares(without_bias), squares["mean"]
    q, k = reader.term("mean")
    crossed, rest_crossed = (
        reader.products(q, k, patterns)
        for patterns in (without_bias, reader.non_relative(without_bias))
    )
    squares["covariance"] = Squares(  # the pattern less the mean term
        whole=of_scores.whole + of_mean.whole - 2.0 * crossed,
        rest=of_scores.rest + of_mean.rest - 2.0 * rest_crossed,
    )
    if reader.sums.bias is not None:
        bias, n_cells = reader.pattern_of(reader.sums.bias[None].double()), reader.cells.count
        for of_part, patterns in (
            (products, reader.patterns),
            (others, reader.patterns_of_others),
        ):
            by_fold = (bias * patterns).sum((1, 2)) / n_cells
            of_part["alibi"] = Estimates.of_means(by_fold, reader.weights)
            of_part["covariance"] = of_part["covariance"] - of_part["alibi"]
        of_bias, of_rest = (
            whole.with_values((pattern.square().sum() / n_cells).expand_as(whole.values))
            for pattern in (bias, reader.non_relative(bias))
        )
        squares["alibi"] = Squares(whole=of_bias, rest=of_rest)
    return {name: _term(reader, products[name], others[name], squares[name]) for name in products}


def _term(reader: Reader, product: Estimates, of_others: Estimates, squares: Squares) -> Term:
    square = beyond_rounding(squares.whole, reader.score_square)
    rest = beyond_rounding(squares.rest, reader.score_square)
    exceeds_rounding = float(square.values.any())
    return Term(
        rms=rms(square),
        **reader.shares(product * exceeds_rounding, of_others * exceeds_rounding),
        relative_r2=share(square - rest, square),
        non_relative=rms(rest),
    )


@dataclass(frozen=True, kw_only=True)
class Written:
    """A writer's part of the keys or queries of a layer (or head).

    Attributes:
        share: its share of the whole pattern.
        share_first, share_others: what the two parts of the pattern bring of the share.
        rms: RMS of the pattern that the part makes with the other side, nats.
        first_key: the share that a head gets from the first key; undefined for other writers.
    """

    share: Interval
    share_first: Interval
    share_others: Interval
    rms: Interval
    first_key: Interval


def written_terms(reader: Reader, side: Side) -> dict[str, Written]:
    """Return each writer's part of the written terms of keys or queries.

    The key side is <R_i E q_i, R_j dk_j>, the query side <R_i dq_i, R_j k0>, so the shares of both
    sides add up to the three written terms.
    """
    sums = reader.sums
    brought, first = (
        (sums.keys, sums.first_keys) if side == "key" else (sums.queries, sums.first_queries)
    )
    readings, terms = reader.readings(side, reader.patterns), {}
    of_others = readings
    if reader.patterns_of_others is not reader.patterns:
        of_others = reader.readings(side, reader.patterns_of_others)
    for writer, x in brought.items():
        written = reader.part(x, "written")
        pair = (sums.q, written) if side == "key" else (written, reader.mean(sums.k))
        square = beyond_rounding(reader.pair_square(*pair), reader.score_square)
        exceeds_rounding = float(square.values.any())
        product = reader.written_products(readings, x) * exceeds_rounding
        from_first = UNDEFINED
        if writer in first:
            first_product = reader.written_products(readings, first[writer]) * exceeds_rounding
            from_first = share(first_product, reader.square)
        terms[writer] = Written(
            **reader.shares(product, reader.written_products(of_others, x) * exceeds_rounding),
            rms=rms(square),
            first_key=from_first,
        )
    return terms


def direct_share(reader: Reader, writer: str) -> Interval:
    """Return the share of the pattern lost when queries and keys lose a writer's position."""
    query, key = (
        reader.part(x[writer], "written") for x in (reader.sums.queries, reader.sums.keys)
    )
    q, k, pattern = reader.sums.q, reader.sums.k, reader.patterns
    lost = (
        reader.products(q, key, pattern)
        + reader.products(query, k, pattern)
        - reader.products(query, key, pattern)
    )
    return share(lost, reader.square)


def scores_without(reader: Reader, writer: str) -> Maps:
    """Return fold means of the scores, nats, of queries and keys without a writer's position.

    The norms' scales of every token stay as they are, and all folds lose the same vectors, as in a
    forward pass. Scores are before a soft cap; ALiBi's bias is in them.
    """
    q, k = reader.sums.q, reader.sums.k
    query, key = (
        pooled(reader.part(x[writer], "written").double(), reader.counts)
        for x in (reader.sums.queries, reader.sums.keys)
    )

    def products(queries: Vectors, keys: Vectors) -> Maps:
        return torch.einsum("fihd,fjhd->fij", reader.at_rows(queries), reader.turned(keys))

    return reader.scores + (products(q - query, k - key) - products(q, k)) * reader.sums.scale


def term_maps(reader: Reader) -> dict[str, Float[Tensor, "row key_pos"]]:
    """Return the patterns of the whole and of each term over all sequences, nats; NaN elsewhere."""
    maps = {name: reader.mean_map(*reader.term(name)) for name in _PARTS}
    cells = reader.cells.mask
    whole = pooled(reader.patterns, reader.counts).where(cells, torch.nan)
    rest = whole - maps["mean"]
    if reader.sums.bias is not None:
        maps["alibi"] = reader.pattern_of(reader.sums.bias[None].double())[0].where(
            cells, torch.nan
        )
        rest = rest - maps["alibi"]
    return {"all": whole, **maps, "covariance": rest}


@dataclass(frozen=True, kw_only=True, eq=False)
class Clock:
    """Mean keys (or queries) along the two axes in which they differ most between positions.

    Attributes:
        whole: the sum of all writers.
        writers: the part of each writer, along the same axes.
        explained: each axis's share of the variance between positions.
    """

    whole: Float[Tensor, "pos two"]
    writers: Mapping[str, Float[Tensor, "pos two"]]
    explained: Float[Tensor, " two"]


def clock(reader: Reader, side: Side = "key") -> Clock:
    """Return the coordinates of each position's mean key (query) on their two principal axes."""
    whole, brought = (
        (reader.sums.k, reader.sums.keys) if side == "key" else (reader.sums.q, reader.sums.queries)
    )

    def about_mean(x: Vectors) -> Float[Tensor, "pos width"]:
        return pooled(reader.part(x, "written").double(), reader.counts).flatten(1)

    written = about_mean(whole)
    _, sizes, axes = torch.linalg.svd(written[reader.skip_keys :], full_matrices=False)
    axes = axes[:2] * axes[:2].sum(1, keepdim=True).sign()
    return Clock(
        whole=written @ axes.T,
        writers={name: about_mean(x) @ axes.T for name, x in brought.items()},
        explained=(sizes.square() / sizes.square().sum())[:2],
    )


def readers(sums: PositionSums) -> Iterator[tuple[dict[str, int], Reader]]:
    """Yield each layer, or each head, with the columns that name it."""
    for layer, reader in sums.readers.items():
        for head, one in reader.heads():
            names = {"layer": layer} if head is None else {"layer": layer, "head": head}
            yield (
                names,
                Reader(sums=one, counts=sums.counts, skip_keys=sums.skip_keys, apart=sums.apart),
            )


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
