"""The mean term and the covariance term of a score map: an exact split without any ablation.

A score map is the mean term <E q_i, E k_j> (each position has a mean vector of its own: the
positional basis of Song and Zhong, arXiv 2310.04861) plus the covariance term, that of q_i and k_j
over sequences (tokens that share their past resemble each other). Neither depends on the basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    cross_products,
    fold_weights,
    jackknife,
    rms,
    share,
)
from nope_probe.analyses.pattern import kept_cells, row_centred


@dataclass(frozen=True, kw_only=True)
class MeanCovariance:
    """One layer's mean and covariance terms.

    Attributes:
        layer: the layer, from 0.
        mean, covariance: shares <term, v(all)> / <v(all), v(all)>; they add to 1.
        mean_rms, covariance_rms: RMS of each term's pattern, nats.
        dimensions: how many dimensions the positions' mean keys span (participation ratio).
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
        _split_layer(
            layer, scores[:, layer], mean_term[:, layer], key_means[:, layer], skip_keys, counts
        )
        for layer in range(scores.shape[1])
    ]


def _split_layer(
    layer: int,
    scores: Float[Tensor, "fold query_pos key_pos"],
    mean_term: Float[Tensor, "fold query_pos key_pos"],
    key_means: Float[Tensor, "fold pos width"],
    skip_keys: int,
    counts: Int[Tensor, " fold"] | None,
) -> MeanCovariance:
    cells = kept_cells(scores.shape[-1], skip_keys)
    whole = row_centred(scores.double(), skip_keys)[:, cells]
    mean = row_centred(mean_term.double(), skip_keys)[:, cells]
    maps = torch.stack([whole, mean, whole - mean])
    gram = cross_products(maps, maps, counts)
    return MeanCovariance(
        layer=layer,
        mean=share(gram[:, 1, 0], gram[:, 0, 0], counts),
        covariance=share(gram[:, 2, 0], gram[:, 0, 0], counts),
        mean_rms=rms(gram[:, 1, 1], counts),
        covariance_rms=rms(gram[:, 2, 2], counts),
        dimensions=participation_ratio(key_means[:, skip_keys:].double(), counts),
    )


def participation_ratio(
    means: Float[Tensor, "fold pos width"], counts: Int[Tensor, " fold"] | None = None
) -> Interval:
    """Return (tr C)^2 / tr C^2 of the covariance C of the positions' means, with its interval.

    C is taken between different folds, so that noise adds no dimensions to the trace. The ratio is
    undefined where the trace does not exceed its noise: all positions have the same mean.
    """
    centred = means - means.mean(1, keepdim=True)
    folds, weights = list(range(len(means))), fold_weights(len(means), counts)
    rests = [[f for f in folds if f != out] for out in (None, *folds)]
    grams = [_gram(centred[rest], weights[rest]) for rest in rests]
    traces = torch.stack([gram.trace() for gram in grams])
    if not jackknife(traces, counts).low > 0:
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
