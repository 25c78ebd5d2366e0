"""Differences of numbers between two models or runs: intervals, and tests over folds.

If both ran on the same sequences, dealt to the same folds, differences are taken fold by fold
(paired), so the sequences' common noise cancels. Otherwise variances add up. A difference is tested
by t with the folds' degrees of freedom, and many tests together by the rule of Holm (1979): the
chance of naming any number that does not differ is at most 5%.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf, isfinite, nan
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from nope_probe.analyses.jackknife import (
    MIN_FOLDS,
    Interval,
    error_of,
    freedom,
    rms_difference,
    squared,
)

LEVEL = 0.05  # of the chance to name any number that does not differ
ROUNDING = 2**-20  # absolute and relative: what float32 numbers of two equal models may differ by


class Difference(NamedTuple):
    """A number of a model or run less the same number of another.

    Attributes:
        interval: the difference with its 95% interval, whose ends are NaN without folds.
        p: the chance of so large a difference without one; NaN without folds.
        method: `paired` if it was taken fold by fold, or `unpaired`; None without folds.
    """

    interval: Interval
    p: float
    method: Literal["paired", "unpaired"] | None


def compare_numbers(
    base: Interval, other: Interval, *, paired: bool, is_rms: bool = False
) -> Difference:
    """Compute `other` less `base`, and test it.

    Paired differences are taken fold by fold. Others are of independent estimates: the test is that
    of Welch (1947). Of RMS, the squares are tested, which are smooth where an RMS is 0.

    An interval that reaches farther on one side allows for a bias, as those of the parts of
    attention do: of a positional part, which may be less than estimated. What both biases share
    cancels, and the rest widens the interval of the difference, and weakens its test.

    Args:
        base: the number of the first model, with its replicates.
        other: that of the other model.
        paired: whether fold f holds the same sequences in both, so that their noise cancels.
        is_rms: whether the number is an RMS that is corrected for noise.
    """
    value, y, x = other.value - base.value, base.replicates, other.replicates
    if x is None or y is None or min(len(x.weights), len(y.weights)) < MIN_FOLDS or value != value:
        return Difference(Interval(value=value, low=nan, high=nan), nan, None)
    paired = paired and x.weights.equal(y.weights)
    if is_rms:
        x, y = squared(x), squared(y)
    if paired:
        error, degrees = error_of(x - y), freedom(x.weights)
    else:
        errors = [error_of(z) for z in (x, y)]
        error, degrees = hypot(*errors), _welch(errors, [freedom(z.weights) for z in (x, y)])
    change, bias = float(x.values[0] - y.values[0]), 0.0
    if is_rms:
        interval = rms_difference(x, y) if paired else independent_difference(other, base)
    else:
        bias = _too_high(other) - _too_high(base)
        half = float(stdtrit(degrees, 0.975)) * error
        low, high = value - half - max(bias, 0.0), value + half - min(bias, 0.0)
        interval = Interval(value=value, low=low, high=high)
    toward_zero = max(bias if change > 0 else -bias, 0.0)
    p = 1.0
    if abs(value) - toward_zero > ROUNDING * max(1.0, abs(base.value)):
        t = (abs(change) - toward_zero) / error if error else inf
        p = float(2 * stdtr(degrees, -t))
    return Difference(interval, p, "paired" if paired else "unpaired")


def independent_difference(one: Interval, other: Interval) -> Interval:
    """Return the difference of estimates from independent data.

    The interval keeps asymmetric arms, as those of an RMS or a ratio are (Zou and Donner 2008). Its
    lower arm adds, in squares, the lower arm of `one` and the upper arm of `other`; its upper arm
    adds the opposite arms.

    Example:
        >>> one = Interval(value=5.0, low=2.0, high=17.0)
        >>> other = Interval(value=1.0, low=-4.0, high=5.0)
        >>> independent_difference(one, other)
        4 [-1, 17]
    """
    value = one.value - other.value
    down = hypot(one.value - one.low, other.high - other.value)
    up = hypot(one.high - one.value, other.value - other.low)
    return Interval(value=value, low=value - down, high=value + up)


def _too_high(interval: Interval) -> float:
    """Return how much less an estimate may be by its bias; negative if it may be more."""
    bias = 2 * interval.value - interval.low - interval.high
    return bias if isfinite(bias) else 0.0


def _welch(errors: Sequence[float], degrees: Sequence[float]) -> float:
    """Return the degrees of freedom of a difference of independent estimates (Welch 1947)."""
    squares = [error**2 for error in errors]
    below = sum(square**2 / n for square, n in zip(squares, degrees, strict=True))
    return sum(squares) ** 2 / below if below else min(degrees)


def holm(p_values: pd.Series[float]) -> pd.Series[float]:
    """Return p values adjusted by Holm's rule; tests that are NaN do not count.

    Example:
        >>> holm(pd.Series([0.01, 0.5, 0.02, float("nan")])).tolist()
        [0.03, 0.5, 0.04, nan]
    """
    p = p_values.dropna().sort_values()
    return (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1.0).reindex(p_values.index)
