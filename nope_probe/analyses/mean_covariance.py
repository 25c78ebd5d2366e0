"""The mean term and the covariance term of a score map: an exact split without any ablation.

Song and Zhong (arXiv 2310.04861) split a vector h of sequence c at position t into the global mean,
a positional part pos_t (the mean over sequences, less the global mean), a context part ctx_c (the
mean over positions, less the global mean), and a residual. Put into queries and keys, a mean score
has four blocks, with mean_t = global mean + pos_t and rest = ctx_c + residual:

    mean . mean    the mean term <E q_i, E k_j>: each position has a mean vector of its own
    mean . rest    0 by construction: <E q_i, E rest_j>, and E rest_j = 0 over sequences
    rest . mean    0 by construction, likewise
    rest . rest    the covariance term, that of q_i and k_j over sequences: tokens that share their
                   past resemble each other

The cross terms vanish cell by cell, whatever the model, so the first and the last block are the
score map. Within the last one, `split_covariance` separates ctx_c from the residual: none of those
four parts is 0 by construction, but ctx.ctx is one number and residual.ctx one number per query,
and softmax ignores both. No block depends on the basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    ProductSums,
    fold_weights,
    jackknife,
    rms,
    share,
)
from nope_probe.analyses.pattern_rows import (
    Folds,
    as_layer,
    beyond_rounding,
    exceeds_rounding,
    mean_squares,
)
from nope_probe.maps.centred import centred_rows, n_kept_cells
from nope_probe.maps.stored_maps import row_blocks


@dataclass(frozen=True, kw_only=True)
class MeanCovariance:
    """One layer's mean and covariance terms.

    Attributes:
        layer: the layer, from 0.
        mean, covariance: shares <term, v(all)> / <v(all), v(all)>; they add to 1.
        mean_rms, covariance_rms: RMS of each term's pattern, nats.
        dimensions: how many dimensions the positions' mean keys span (participation ratio).

    A pattern or term within the rounding of the scores is 0, and nothing has a share of it.
    """

    layer: int
    mean: Interval
    covariance: Interval
    mean_rms: Interval
    covariance_rms: Interval
    dimensions: Interval


def split_mean_covariance(
    scores: Float[Tensor, "fold layer query_pos key_pos"],
    mean_term: Float[Tensor, "fold layer query_pos key_pos"],
    key_means: Float[Tensor, "fold layer pos width"],
    skip_keys: int = 0,
    counts: Int[Tensor, " fold"] | None = None,
) -> list[MeanCovariance]:
    """Return the mean and covariance terms of each layer's pattern.

    Args:
        scores: fold maps of the score, nats, as `capture_scores(..., mean_term=True)` returns them,
        mean_term: with their mean term, nats,
        key_means: and the mean key of each position.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
    """
    return [
        split_layer(
            layer, scores[:, layer], mean_term[:, layer], key_means[:, layer], skip_keys, counts
        )
        for layer in range(scores.shape[1])
    ]


def split_layer(
    layer: int,
    scores: Folds,
    mean_term: Folds,
    key_means: Float[Tensor, "fold pos width"],
    skip_keys: int = 0,
    counts: Int[Tensor, " fold"] | None = None,
) -> MeanCovariance:
    """Return the mean and covariance terms of one layer's pattern, as `split_mean_covariance`."""
    sums, scores, mean_term = ProductSums(), as_layer(scores), as_layer(mean_term)
    n_cells, score_square = n_kept_cells(scores.n, skip_keys), torch.zeros((), dtype=torch.float64)
    for start, stop in row_blocks(scores.n, scores.n_folds):
        raw, raw_mean = (each.rows(start, stop).double() for each in (scores, mean_term))
        score_square += mean_squares(raw, start, skip_keys, n_cells).mean()
        whole, mean = (centred_rows(each, start, skip_keys) for each in (raw, raw_mean))
        sums.add(torch.stack([whole, mean, whole - mean]))
    gram = sums.cross_products(n_cells, counts)
    squares = [beyond_rounding(gram[:, each, each], score_square) for each in range(3)]
    return MeanCovariance(
        layer=layer,
        mean=share(gram[:, 1, 0], squares[0], counts),
        covariance=share(gram[:, 2, 0], squares[0], counts),
        mean_rms=rms(squares[1], counts),
        covariance_rms=rms(squares[2], counts),
        dimensions=participation_ratio(key_means[:, skip_keys:].double(), counts),
    )


@dataclass(frozen=True, kw_only=True)
class CovarianceParts:
    """The parts of a covariance term; their sum is the term, in its unit.

    Attributes:
        context: ctx.ctx, the same in every cell.
        query_residual: residual.ctx, the same for all keys of a query.
        key_residual: ctx.residual, the same for all queries of a key.
        residual: residual.residual.
    """

    context: Float[Tensor, ""]
    query_residual: Float[Tensor, " query_pos"]
    key_residual: Float[Tensor, " key_pos"]
    residual: Float[Tensor, "query_pos key_pos"]


def split_covariance(covariance: Float[Tensor, "query_pos key_pos"]) -> CovarianceParts:
    """Return the parts of the covariance term that context and residual bring.

    ctx_c is the mean of the rest over positions, so the parts are means of the covariance term over
    queries and keys, and need no further sums over sequences.

    Args:
        covariance: the covariance term over all queries and keys (j > i too), nats.

    Raises:
        ValueError: for a masked cell.

    Example:
        >>> parts = split_covariance(torch.tensor([[3.0, 1.0], [1.0, 3.0]]))
        >>> float(parts.context), parts.residual.tolist()
        (2.0, [[1.0, -1.0], [-1.0, 1.0]])
    """
    if not covariance.isfinite().all():
        raise ValueError("context is a mean over all positions: expected no masked cell")
    by_query, by_key, context = covariance.mean(1), covariance.mean(0), covariance.mean()
    return CovarianceParts(
        context=context,
        query_residual=by_query - context,
        key_residual=by_key - context,
        residual=covariance - by_query[:, None] - by_key[None] + context,
    )


def participation_ratio(
    means: Float[Tensor, "fold pos width"], counts: Int[Tensor, " fold"] | None = None
) -> Interval:
    """Return (tr C)^2 / tr C^2 of the covariance C of the positions' means, with its interval.

    C is taken between different folds, so that noise adds no dimensions to the trace. The ratio is
    undefined where the trace does not exceed its noise, or the means' rounding: all positions have
    the same mean.
    """
    centred = means - means.mean(1, keepdim=True)
    folds, weights = list(range(len(means))), fold_weights(len(means), counts)
    rests = [[f for f in folds if f != out] for out in (None, *folds)]
    grams = [_gram(centred[rest], weights[rest]) for rest in rests]
    traces = torch.stack([gram.trace() for gram in grams])
    square = means.square().sum((1, 2)).mean()
    if not (jackknife(traces, counts).low > 0 and exceeds_rounding(traces, square)):
        return UNDEFINED
    ratios = traces.square() / torch.stack([gram.square().sum() for gram in grams])
    return jackknife(ratios, counts)


def _gram(
    folds: Float[Tensor, "fold pos width"], weights: Float[Tensor, " fold"]
) -> Float[Tensor, "pos pos2"]:
    """Return the mean inner products of positions over pairs of different folds, by weight."""
    weighted = weights[:, None, None] * folds
    total, same = weighted.sum(0), torch.einsum("fpw,fqw->pq", weighted, weighted)
    return (total @ total.T - same) / (weights.sum().square() - weights.square().sum())
