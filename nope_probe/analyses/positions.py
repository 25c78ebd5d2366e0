"""Exact splits of a layer's pattern: rotation, written position, and its writers.

Before RoPE a layer's mean query and key at a position are E q_i = q0 + dq_i and E k_j = k0 + dk_j,
with q0 and k0 the means over positions. R_i is RoPE's rotation at position i. The mean term of the
scores then has four parts: rotation <R_i q0, R_j k0>, the position in keys <R_i q0, R_j dk_j>, the
position in queries <R_i dq_i, R_j k0>, and both <R_i dq_i, R_j dk_j>. dq and dk are sums over
writers, and so are the last three parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval, rms, share
from nope_probe.analyses.pattern_rows import beyond_rounding
from nope_probe.analyses.reader import PARTS, Maps, Reader, Side, Squares, Vectors
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.folds import pooled
from nope_probe.maps.positions import PositionSums

TERMS = ("rotation", "written_key", "written_query", "written_both")


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
    pairs = {name: reader.term(name) for name in PARTS}
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
    maps = {name: reader.mean_map(*reader.term(name)) for name in PARTS}
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
