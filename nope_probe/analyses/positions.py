"""Exact splits of a layer's lead and pattern: rotation, written position, and its writers.

Before RoPE a layer's mean query and key at a position are E q_i = q0 + dq_i and E k_j = k0 + dk_j,
with q0 and k0 the means over positions. R_i is RoPE's rotation at position i. The mean term of the
scores then has four parts: rotation <R_i q0, R_j k0>, the position in keys <R_i q0, R_j dk_j>, the
position in queries <R_i dq_i, R_j k0>, and both <R_i dq_i, R_j dk_j>. dq and dk are sums over
writers, and so are the last three parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval, along, jackknife, rms, share
from nope_probe.analyses.pattern_rows import beyond_rounding, not_by_distance
from nope_probe.analyses.reader import PARTS, FoldVectors, Reader, ScoreRows, Side, Size
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.folds import pooled, pooled_by_half
from nope_probe.maps.positions import PositionSums
from nope_probe.removal import Writer

TERMS = ("rotation", "written_key", "written_query", "written_both")


@dataclass(frozen=True, kw_only=True)
class PositionTerm:
    """A term of a layer's (or head's) lead or pattern.

    Attributes:
        size: the mean of the term's lead over queries, or the RMS of its pattern, nats.
        part: how much of the whole V the term T has, nats: of a lead its mean over queries, of a
            pattern <T, V> / sqrt(<V, V>). Undefined where V does not exceed its noise.
        relative_r2: share of a pattern's square that has the form a(i) + f(i - j); undefined for
            leads.
        not_by_distance: RMS of the rest, nats.
    """

    size: Interval
    part: Interval
    relative_r2: Interval
    not_by_distance: Interval


def position_terms(reader: Reader) -> dict[str, PositionTerm]:
    """Return a lead's or pattern's terms: the whole, the mean term, its four parts, and the rest.

    The four parts add up to the mean term's part; with the covariance term (and ALiBi), to the
    size of the whole.
    `norm` is a part of the written terms: what the norms make of vectors that know nothing of
    position, because their mean scale depends on the position.
    """
    products, sizes = {"all": reader.square}, {"all": reader.size_of(reader.scores)}
    pairs = {name: reader.term(name) for name in PARTS}
    if reader.of_norm is not None:
        pairs["norm"] = reader.of_norm
    for name, (q, k) in pairs.items():
        products[name] = reader.products(q, k, reader.values)
        sizes[name] = reader.pair_size(q, k)
    products["covariance"] = products["all"] - products["mean"]
    without_bias, rest_crossed = reader.sums.scores.double(), None
    if reader.question == "pattern":
        rest = not_by_distance(reader.pattern_of(without_bias))
        rest_crossed = reader.products(*pairs["mean"], rest)
    crossed = reader.products(*pairs["mean"], reader.values_of(without_bias))
    sizes["covariance"] = reader.size_of(without_bias).less(sizes["mean"], crossed, rest_crossed)
    if reader.sums.bias is not None:
        bias = reader.sums.bias[None].double()
        by_fold = (reader.values_of(bias) * reader.values).sum((1, 2)) / reader.n_values
        products["alibi"] = Estimates.of_means(by_fold, reader.weights)
        products["covariance"] = products["covariance"] - products["alibi"]
        sizes["alibi"] = reader.size_of(bias.expand_as(reader.scores))
    return {name: _term(reader, products[name], sizes[name]) for name in products}


def _term(reader: Reader, product: Estimates, size: Size) -> PositionTerm:
    size, part = _sized(reader, product, size)
    relative_r2 = not_by_distance = UNDEFINED
    if size.rest is not None:
        relative_r2, not_by_distance = share(size.square - size.rest, size.square), rms(size.rest)
    return PositionTerm(
        size=size.nats,
        part=part,
        relative_r2=relative_r2,
        not_by_distance=not_by_distance,
    )


def _part(reader: Reader, product: Estimates, size: Size) -> Interval:
    """Return how much of the whole lead or pattern a term has, nats.

    Args:
        reader: the lead or pattern.
        product: <term, whole>, 0 if the term is within rounding.
        size: of the term.
    """
    part = along(product, reader.square)
    if part is None:
        return UNDEFINED
    return jackknife(part) if reader.question == "pattern" else size.nats


def _sized(reader: Reader, product: Estimates, size: Size) -> tuple[Size, Interval]:
    """Return a term's size, 0 within rounding, and how much of the whole the term has, nats."""
    square = beyond_rounding(size.square, reader.score_square)
    rest = None if size.rest is None else beyond_rounding(size.rest, reader.score_square)
    size = replace(size, square=square, rest=rest)
    return size, _part(reader, product * float(square.values.any()), size)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A writer's part of the keys or queries of a layer (or head).

    Attributes:
        part: how much of the whole lead or pattern it writes, nats; see `PositionTerm`.
        size: the mean lead, or the RMS of the pattern, that the part makes with the other side,
            nats.
        from_first_key: the nats of `part` that a head gets from the first key; undefined for other
            writers.
    """

    part: Interval
    size: Interval
    from_first_key: Interval


def written_terms(reader: Reader, side: Side) -> dict[str, Written]:
    """Return each writer's part of the written terms of keys or queries.

    The key side is <R_i E q_i, R_j dk_j>, the query side <R_i dq_i, R_j k0>, so the parts of both
    sides add up to the three written terms.
    """
    sums = reader.sums
    brought, first = (
        (sums.keys, sums.first_keys) if side == "key" else (sums.queries, sums.first_queries)
    )
    readings, terms = reader.readings(side), {}

    def written_part(x: FoldVectors) -> tuple[Interval, Interval]:
        written = reader.part(x, "written")
        pair = (sums.q, written) if side == "key" else (written, reader.mean(sums.k))
        product = reader.written_products(readings, x)
        size, part = _sized(reader, product, reader.pair_size(*pair))
        return size.nats, part

    for writer, x in brought.items():
        size, part = written_part(x)
        from_first = written_part(first[writer])[1] if writer in first else UNDEFINED
        terms[writer] = Written(part=part, size=size, from_first_key=from_first)
    return terms


def written_by(reader: Reader, writer: Writer) -> tuple[FoldVectors, FoldVectors]:
    """Return a writer's position in queries and keys; of an attention, that of all its heads."""
    sums = reader.sums
    names = [name for name in sums.keys if writer in (name, Writer(name).whole)]
    query, key = (
        torch.stack([x[name] for name in names]).sum(0) for x in (sums.queries, sums.keys)
    )
    return reader.part(query, "written"), reader.part(key, "written")


def direct_part(reader: Reader, writer: Writer) -> Interval:
    """Return the nats of a lead or pattern lost when queries and keys lose a writer's position."""
    query, key = written_by(reader, writer)
    q, k = reader.sums.q, reader.sums.k
    # The vectors of the two halves of heads are multiplied in turn, and the products add up.
    pair = torch.cat((q, query), 2), torch.cat((key, k - key), 2)
    size = reader.pair_size(*pair) if reader.question == "lead" else Size(square=reader.square)
    return _part(reader, reader.products(*pair, reader.values), size)


def scores_without(reader: Reader, writer: Writer) -> ScoreRows:
    """Return fold means of the scores, nats, of queries and keys without a writer's position.

    The norms' scales of every token stay as they are, and the folds of a half lose the same
    vectors, as in a forward pass. Scores are before a soft cap; ALiBi's bias is in them.
    """
    q, k = reader.sums.q, reader.sums.k
    query, key = (pooled_by_half(x.double(), reader.counts) for x in written_by(reader, writer))

    def products(queries: FoldVectors, keys: FoldVectors) -> ScoreRows:
        left, right = reader.factors(queries, keys)
        return left @ right.mT

    return reader.scores + products(q - query, k - key) - products(q, k)


def term_maps(reader: Reader) -> dict[str, Float[Tensor, "row key_pos"]]:
    """Return the patterns of the whole and of each term over all sequences, nats.

    The first column holds the lead of the first key; other cells are NaN.
    """
    maps = {name: reader.mean_map(*reader.term(name)) for name in PARTS}
    scores = {"all": pooled(reader.scores, reader.counts), **maps}
    if reader.sums.bias is not None:
        scores["alibi"] = reader.sums.bias.double()
    scores["covariance"] = scores["all"] - sum(scores[x] for x in ("mean", "alibi") if x in scores)
    return {
        name: reader.pattern_of(of_term[None]).mean_with_lead() for name, of_term in scores.items()
    }


def readers(sums: PositionSums) -> Iterator[tuple[dict[str, int], Reader]]:
    """Yield each layer, or each head, with the columns that name it."""
    for layer, reader in sums.readers.items():
        for head, of_head in reader.heads():
            names = {"layer": layer} if head is None else {"layer": layer, "head": head}
            reader_of_head = Reader(
                sums=of_head,
                counts=sums.counts,
                skip_keys=sums.skip_keys,
                kept_positions=sums.kept_positions,
            )
            yield names, reader_of_head
