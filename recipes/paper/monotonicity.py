"""Tests whether a simulated map increases in j, from steps between neighbouring keys.

A single step is smaller than its noise, so two kinds of mean are tested: the mean step at each
distance from the query, and the mean step over the cells in which the mean field's scores fall.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from scipy.special import stdtrit
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval, jackknife
from nope_probe.analyses.pattern import LAG
from nope_probe.analyses.simulation import Estimate
from nope_probe.maps import MIN_FOLDS
from nope_probe.maps.estimates import Estimates, fold_weights, leave_one_out

LEVEL = 0.05
MapStack = Float[Tensor, "layer query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class MeanSteps:
    """Mean steps towards the query, one per layer and distance.

    The step at distance g is the mean over queries of S[i, i-g+1] - S[i, i-g], in nats: the gain in
    score of a key that is nearer by one. Index 0 is g = 2; the step onto the diagonal is left out.

    Attributes:
        mean: the steps.
        se: their standard errors, at least the resolution of float32.
        threshold: the number of standard errors that is significant at 5%, over all distances.
    """

    mean: Float[Tensor, "layer distance"]
    se: Float[Tensor, "layer distance"]
    threshold: float


@dataclass(frozen=True, kw_only=True)
class MonotonicityTest:
    """Whether one layer's map increases in j.

    Attributes:
        layer: the layer, from 0.
        monotonicity: share of pairs of keys at a distance of 8 whose nearer key scores higher.
            Noise biases it towards 1/2.
        distances: number of distances from the query at which there is a step.
        rises, falls: number of distances at which the mean step is significantly up, or down.
        falling_cells: number of cells in which the mean field falls by more than the resolution.
        theory_fall: the mean field's mean step in these cells, nats.
        fall: the simulation's mean step in these cells, nats, with its 95% interval.
    """

    layer: int
    monotonicity: Interval
    distances: int
    rises: int
    falls: int
    falling_cells: int
    theory_fall: float
    fall: Interval

    @property
    def verdict(self) -> str:
        """The result: `not increasing`, `flat`, `increasing` or `increasing where resolved`."""
        if self.falls or self.fall.high < 0:
            return "not increasing"
        if not self.rises:
            return "flat"
        return "increasing" if self.rises == self.distances else "increasing where resolved"


def monotonicity_tests(
    estimate: Estimate, theory: MapStack, resolution: float
) -> list[MonotonicityTest]:
    """Test for each layer whether its mean scores increase in j.

    Args:
        estimate: fold means of score maps, nats.
        theory: the mean field's score maps, nats.
        resolution: the smallest difference that the scores resolve, nats.
    """
    steps = mean_steps(estimate, resolution)
    return [_test_layer(estimate, steps, theory, layer, resolution) for layer in range(len(theory))]


def mean_steps(estimate: Estimate, resolution: float) -> MeanSteps:
    """Return the mean steps in j over queries, for each distance of the key from the query.

    Args:
        estimate: fold means of score maps, nats.
        resolution: the smallest difference that the scores resolve, nats.
    """
    folds = by_distance(steps_in_j(estimate.folds))
    steps = replace(estimate, folds=folds[..., None])
    threshold = float(stdtrit(len(folds) - 1, 1 - LEVEL / (2 * folds.shape[-1])))
    error = (steps.se[..., 0] ** 2 + resolution**2).sqrt()
    return MeanSteps(mean=steps.mean[..., 0], se=error, threshold=threshold)


def steps_in_j(
    maps: Float[Tensor, "*batch query_pos key_pos"],
) -> Float[Tensor, "*batch query_pos key_step"]:
    """Return S[i, j+1] - S[i, j]."""
    return maps[..., 1:] - maps[..., :-1]


def by_distance(
    steps: Float[Tensor, "*batch query_pos key_step"],
) -> Float[Tensor, "*batch distance"]:
    """Return the mean of steps over queries, for each distance from 2 on."""
    means = [steps.diagonal(-g, -2, -1).mean(-1) for g in range(2, steps.shape[-2])]
    return torch.stack(means, -1)


def _test_layer(
    estimate: Estimate, steps: MeanSteps, theory: MapStack, layer: int, resolution: float
) -> MonotonicityTest:
    mean, error = steps.mean[layer], steps.threshold * steps.se[layer]
    below = torch.ones(theory.shape[-2], theory.shape[-1] - 1, dtype=torch.bool).tril(-1)
    predicted = steps_in_j(theory[layer])
    falling = below & (predicted < -resolution)
    return MonotonicityTest(
        layer=layer,
        monotonicity=_share(estimate, layer),
        distances=len(mean),
        rises=int((mean > error).sum()),
        falls=int((mean < -error).sum()),
        falling_cells=int(falling.sum()),
        theory_fall=float(predicted[falling].mean()),
        fall=_mean_step(estimate, layer, falling),
    )


def _mean_step(
    estimate: Estimate, layer: int, cells: Bool[Tensor, "query_pos key_step"]
) -> Interval:
    folds = steps_in_j(estimate.folds[:, layer])[:, cells]
    if len(folds) < MIN_FOLDS or not cells.any():
        return UNDEFINED
    weights = fold_weights(len(folds), estimate.counts)
    return jackknife(Estimates.of_means(folds.mean(-1), weights))


def _share(estimate: Estimate, layer: int) -> Interval:
    folds = estimate.folds[:, layer]
    if len(folds) < MIN_FOLDS:
        return UNDEFINED
    n = folds.shape[-1]
    pairs = torch.ones(n, max(n - LAG, 0), dtype=torch.bool).tril(-1 - LAG)
    weights = fold_weights(len(folds), estimate.counts)
    means = leave_one_out(folds, weights)
    steps = (means[..., LAG:] - means[..., :-LAG])[..., pairs]
    rises = (steps.sign() + 1).mean(-1) / 2  # a tie counts as half
    return jackknife(Estimates(values=rises, weights=weights))
