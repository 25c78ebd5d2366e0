"""Differences of numbers between two models or runs: intervals, and tests over folds.

If both ran on the same sequences, dealt to the same folds, differences are taken fold by fold
(paired), so the sequences' common noise cancels. Otherwise variances add up. A difference is tested
by t with the folds' degrees of freedom, and many tests together by the rule of Holm (1979): the
chance of naming any number that does not differ is at most 5%. Many numbers are taken at once, as
arrays of NumPy, so that finished runs are compared without torch.
"""

from __future__ import annotations

from math import pi
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.special import stdtr, stdtrit

from nope_probe.maps import MIN_FOLDS

LEVEL = 0.05  # of the chance to name any number that does not differ
ROUNDING = 2**-20  # absolute and relative: what float32 numbers of two equal models may differ by
ELLIPSE_POINTS = 721
PerFold = Float[np.ndarray, "number fold"]
Replicates = Float[np.ndarray, "number one_plus_folds"]
PerNumber = Float[np.ndarray, " number"]
Ends = Float[np.ndarray, "number 3"]


class Numbers(NamedTuple):
    """Numbers of a model or run with their 95% intervals.

    Attributes:
        ends: each number, and the lower and the upper end of its interval; NaN where undefined.
        replicates: each number on all folds, then without each; NaN where nothing is known of it.
        weights: the share of all sequences that each fold holds; 0 of a fold that a number lacks.
    """

    ends: Ends
    replicates: Replicates
    weights: PerFold

    def take(self, rows: Int[np.ndarray, " row"]) -> Numbers:
        """Return some of the numbers."""
        return Numbers(*(array[rows] for array in self))


def deviations_of(replicates: Replicates, weights: PerFold) -> PerFold:
    """Return the jackknife's pseudovalues less their mean; 0 of a fold that a number lacks."""
    has_fold, share = weights > 0, np.where(weights > 0, weights, 1.0)
    pseudo = (replicates[:, :1] - (1 - weights) * replicates[:, 1:]) / share
    mean = np.where(has_fold, weights * pseudo, 0.0).sum(1, keepdims=True)
    return np.where(has_fold, pseudo - mean, 0.0)


def errors_of(replicates: Replicates, weights: PerFold) -> PerNumber:
    """Return the jackknife's standard errors; see `jackknife`."""
    return np.sqrt((_scales_of(weights) * deviations_of(replicates, weights) ** 2).sum(1))


def _scales_of(weights: PerFold) -> PerFold:
    return weights / (1 - weights) / (weights > 0).sum(1, keepdims=True)


def freedom_of(weights: PerFold) -> PerNumber:
    """Return the degrees of freedom of t for folds of these weights: F - 1 for F equal folds."""
    return 1 / (weights**2).sum(1) - 1


@np.errstate(divide="ignore", invalid="ignore")
def compare_numbers(
    base: Numbers, other: Numbers, *, paired: bool, is_rms: Bool[np.ndarray, " number"]
) -> pd.DataFrame:
    """Compute `other` less `base`, number by number, and test it.

    Paired differences are taken fold by fold. Others are of independent estimates: the test is that
    of Welch (1947). Of RMS, the squares are tested, which are smooth where an RMS is 0.

    An interval that reaches farther on one side allows for a bias, as those of the parts of
    attention do: of a positional part, which may be less than estimated. What both biases share
    cancels, and the rest widens the interval of the difference, and weakens its test.

    Args:
        base: numbers of the first model.
        other: those of the other model.
        paired: whether fold f holds the same sequences in both, so that their noise cancels.
        is_rms: which numbers are RMS that are corrected for noise.

    Returns:
        `difference`, its interval's ends (NaN without folds), `p`, the chance of so large a
        difference without one, and `method`: `paired`, `unpaired`, or None without folds.
    """
    sides, squared = (other, base), is_rms[:, None]
    x, y = (np.where(squared, of.replicates * abs(of.replicates), of.replicates) for of in sides)
    errors = [errors_of(z, of.weights) for z, of in zip((x, y), sides, strict=True)]
    degrees = [freedom_of(of.weights) for of in sides]
    error, freedom = np.hypot(*errors), _welch(errors, degrees)
    together = np.zeros(len(is_rms), bool)
    if paired and x.shape == y.shape:
        together = (other.weights == base.weights).all(1)
        error = np.where(together, errors_of(x - y, other.weights), error)
        freedom = np.where(together, degrees[0], freedom)
    value, change = other.ends[:, 0] - base.ends[:, 0], x[:, 0] - y[:, 0]
    bias = np.where(is_rms, 0.0, _too_high(other.ends) - _too_high(base.ends))
    half = stdtrit(freedom, 0.975) * error
    ends = np.stack([value, value - half - bias.clip(0), value + half - bias.clip(max=0)], axis=1)
    ends[is_rms] = independent_differences(other.ends[is_rms], base.ends[is_rms])
    both = is_rms & together
    if both.any():
        ends[both] = rms_differences(x[both], y[both], other.weights[both])
    toward_zero = np.where(change > 0, bias, -bias).clip(0)
    is_clear = abs(value) - toward_zero > ROUNDING * abs(base.ends[:, 0]).clip(1.0)
    t = (abs(change) - toward_zero) / error
    p = np.where(is_clear, 2 * stdtr(freedom, -t), 1.0)
    n_folds = [(np.isfinite(of.replicates[:, 1:]) & (of.weights > 0)).sum(1) for of in sides]
    tested = (np.minimum(*n_folds) >= MIN_FOLDS) & np.isfinite(value + change)
    table = pd.DataFrame(ends, columns=["difference", "difference_low", "difference_high"])
    table.loc[~tested, ["difference_low", "difference_high"]] = np.nan
    method = np.where(together, "paired", "unpaired").astype(object)
    method[~tested] = None
    return table.assign(p=np.where(tested, p, np.nan), method=method)


def independent_differences(one: Ends, other: Ends) -> Ends:
    """Return the differences of estimates from independent data.

    The interval keeps asymmetric arms, as those of an RMS or a ratio are (Zou and Donner 2008). Its
    lower arm adds, in squares, the lower arm of `one` and the upper arm of `other`; its upper arm
    adds the opposite arms.

    Example:
        >>> one, other = np.array([[5.0, 2.0, 17.0]]), np.array([[1.0, -4.0, 5.0]])
        >>> independent_differences(one, other).tolist()
        [[4.0, -1.0, 17.0]]
    """
    value = one[:, 0] - other[:, 0]
    down = np.hypot(one[:, 0] - one[:, 1], other[:, 2] - other[:, 0])
    up = np.hypot(one[:, 2] - one[:, 0], other[:, 0] - other[:, 1])
    return np.stack([value, value - down, value + up], axis=1)


def rms_differences(one: Replicates, other: Replicates, weights: PerFold) -> Ends:
    """Return RMS one - RMS other with its interval, from paired estimates of their mean squares.

    The jackknife of a root is too narrow near 0, where the root is not smooth. The interval holds
    the differences of the roots over an ellipse of both squares instead. Any weighted sum of the
    squares varies over this ellipse by its jackknife interval. Squares below 0 count as
    0 in the ends of the interval.
    """
    scale = stdtrit(freedom_of(weights), 0.975)[:, None] * np.sqrt(_scales_of(weights))
    x, y = (scale * deviations_of(squares, weights) for squares in (one, other))
    # A point of the ellipse is the squares' difference, then `one`: equal squares stay equal.
    distance = np.linalg.norm(x - y, axis=1, keepdims=True)
    along = (x - y) / distance.clip(1e-300)
    shared = (x * along).sum(1, keepdims=True)
    across = np.linalg.norm(x - shared * along, axis=1, keepdims=True)
    first, second = one[:, :1], other[:, :1]
    angles = np.linspace(0, 2 * pi, ELLIPSE_POINTS)
    ones = first + shared * np.cos(angles) + across * np.sin(angles)
    others = ones - (first - second) - distance * np.cos(angles)
    roots = np.sqrt(ones.clip(0)) - np.sqrt(others.clip(0))
    value = (np.sign(one) * np.sqrt(abs(one)) - np.sign(other) * np.sqrt(abs(other)))[:, 0]
    low, high = np.minimum(value, roots.min(1)), np.maximum(value, roots.max(1))
    return np.stack([value, low, high], axis=1)


def _too_high(ends: Ends) -> PerNumber:
    """Return how much less estimates may be by their bias; negative if they may be more."""
    bias = 2 * ends[:, 0] - ends[:, 1] - ends[:, 2]
    return np.where(np.isfinite(bias), bias, 0.0)


def _welch(errors: list[PerNumber], degrees: list[PerNumber]) -> PerNumber:
    """Return the degrees of freedom of differences of independent estimates (Welch 1947)."""
    squares = np.stack(errors) ** 2
    below = (squares**2 / np.stack(degrees)).sum(0)
    return np.where(below > 0, squares.sum(0) ** 2 / below, np.minimum(*degrees))


def holm(p_values: pd.Series[float]) -> pd.Series[float]:
    """Return p values adjusted by Holm's rule; tests that are NaN do not count.

    Example:
        >>> holm(pd.Series([0.01, 0.5, 0.02, float("nan")])).tolist()
        [0.03, 0.5, 0.04, nan]
    """
    p = p_values.dropna().sort_values()
    return (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1.0).reindex(p_values.index)
