"""The two routes by which position reaches a score, with no ablation and in any basis.

A score map splits exactly into the mean route <E q_i, E k_j> (each position has a mean vector of
its own) and the content route, the covariance of q_i and k_j over sequences (tokens that share
their past resemble each other).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.noise import NOTHING, Interval, cross_products, jackknife, rms, share
from nope_probe.analyses.pattern import kept_cells, row_centred


@dataclass(frozen=True, kw_only=True)
class Routes:
    """One layer's routes.

    Attributes:
        mean, content: shares <route, v(all)> / <v(all), v(all)>; they add to 1.
        mean_rms, content_rms: RMS of each route's pattern, nats.
        dimensions: how many dimensions the positions' mean keys span (participation ratio).
    """

    layer: int
    mean: Interval
    content: Interval
    mean_rms: Interval
    content_rms: Interval
    dimensions: Interval


def split_routes(
    scores: Float[Tensor, "fold layer query_pos key_pos"],
    mean_route: Float[Tensor, "fold layer query_pos key_pos"],
    key_means: Float[Tensor, "fold layer pos width"],
    skip_keys: int = 0,
) -> list[Routes]:
    """Give each layer's routes from what `capture_scores(..., routes=True)` kept."""
    return [
        _split_layer(
            layer + 1, scores[:, layer], mean_route[:, layer], key_means[:, layer], skip_keys
        )
        for layer in range(scores.shape[1])
    ]


def _split_layer(
    layer: int,
    scores: Float[Tensor, "fold query_pos key_pos"],
    mean_route: Float[Tensor, "fold query_pos key_pos"],
    key_means: Float[Tensor, "fold pos width"],
    skip_keys: int,
) -> Routes:
    cells = kept_cells(scores.shape[-1], skip_keys)
    whole = row_centred(scores.double(), skip_keys)[:, cells]
    mean = row_centred(mean_route.double(), skip_keys)[:, cells]
    maps = torch.stack([whole, mean, whole - mean])
    gram = cross_products(maps, maps)
    return Routes(
        layer=layer,
        mean=share(gram[:, 1, 0], gram[:, 0, 0]),
        content=share(gram[:, 2, 0], gram[:, 0, 0]),
        mean_rms=rms(gram[:, 1, 1]),
        content_rms=rms(gram[:, 2, 2]),
        dimensions=participation_ratio(key_means[:, skip_keys:].double()),
    )


def participation_ratio(means: Float[Tensor, "fold pos width"]) -> Interval:
    """Give (tr C)^2 / tr C^2 of the covariance C of the positions' means, with its interval.

    C is taken between different folds, so that noise adds no dimensions of its own to the trace;
    where the trace cannot be told from zero, positions have no means of their own and no ratio.
    """
    centred = means - means.mean(1, keepdim=True)
    folds = list(range(len(means)))
    grams = [_gram(centred[[f for f in folds if f != out]]) for out in (None, *folds)]
    traces = torch.stack([gram.trace() for gram in grams])
    if not jackknife(traces).low > 0:
        return NOTHING
    return jackknife(traces.square() / torch.stack([gram.square().sum() for gram in grams]))


def _gram(folds: Float[Tensor, "fold pos width"]) -> Float[Tensor, "pos pos2"]:
    """Average the inner products of positions over pairs of different folds."""
    total, same = folds.sum(0), torch.einsum("fpw,fqw->pq", folds, folds)
    return (total @ total.T - same) / (len(folds) * (len(folds) - 1))
