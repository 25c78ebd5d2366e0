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

from nope_probe.analyses.noise import Interval, cross_products, jackknife, rms, share
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
        dimensions=jackknife(participation_ratio(key_means[:, skip_keys:].double())),
    )


def participation_ratio(
    means: Float[Tensor, "fold pos width"],
) -> Float[Tensor, " one_plus_folds"]:
    """Give (tr C)^2 / tr C^2 of the covariance of position means, on all folds and without each.

    C is taken between different folds, so that noise adds no dimensions of its own to the trace.
    """
    centred = means - means.mean(1, keepdim=True)
    total = centred.sum(0)
    ratios = [_ratio(total, centred)]
    for left_out in range(len(means)):
        others = torch.cat([centred[:left_out], centred[left_out + 1 :]])
        ratios.append(_ratio(total - centred[left_out], others))
    return torch.stack(ratios)


def _ratio(
    total: Float[Tensor, "pos width"], folds: Float[Tensor, "fold pos width"]
) -> Float[Tensor, ""]:
    same = torch.einsum("fpw,fqw->pq", folds, folds)
    n_folds = len(folds)
    gram = (total @ total.T - same) / (n_folds * (n_folds - 1))
    return gram.trace().square() / gram.square().sum()
