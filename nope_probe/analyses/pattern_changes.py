"""Differences of a layer's positional pattern between two models, or two states of a model.

Every function takes patterns in the kept cells, their products between folds, then the jackknife.
If both models ran on the same sequences, dealt to the same folds, differences are taken fold by
fold (paired), so the sequences' common noise cancels. Otherwise variances add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import torch

from nope_probe.analyses.jackknife import (
    Interval,
    jackknife,
    rms,
    rms_difference,
    signed_root,
)
from nope_probe.analyses.pattern_rows import (
    PatternSums,
    beyond_rounding,
    mean_squares,
)
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import Pattern


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """RMS of the non-relative part with and without the mask, nats (the paper's section 5).

    Attributes:
        difference: the RMS with the mask less the RMS without it, paired.
    """

    with_mask: Interval
    without_mask: Interval
    difference: Interval


def mask_effect(with_mask: Pattern, without_mask: Pattern) -> MaskEffect:
    """Return the RMS of one layer's non-relative part with and without the mask, and its change.

    Args:
        with_mask: the intact model's pattern.
        without_mask: the pattern without the mask, on the same sequences and cells.
    """
    with_square, without_square = map(non_relative_squares, (with_mask, without_mask))
    return MaskEffect(
        with_mask=rms(with_square),
        without_mask=rms(without_square),
        difference=rms_difference(with_square, without_square),
    )


def non_relative_squares(pattern: Pattern) -> Estimates:
    """Return the mean square of the non-relative part, on all folds and without each fold.

    It is 0 within the rounding of the scores.
    """
    sums, score_square = PatternSums(pattern.cells), torch.zeros((), dtype=torch.float64)
    for block in pattern.blocks():
        score_square += mean_squares(block.scores, block.start, pattern.cells).mean()
        sums.add(block.rows, block.queries)
    _, rest = sums.grams
    return beyond_rounding(pattern.estimates(rest), score_square)


def pattern_difference(one: Pattern, other: Pattern, *, paired: bool) -> Interval:
    """Return the RMS of the difference of two patterns, nats, with noise subtracted.

    Args:
        one: the pattern of one layer.
        other: the pattern of the model to compare with, of the same cells.
        paired: whether fold f holds the same sequences in both.
    """
    x, y = (pattern.dense()[:, pattern.cells.mask] for pattern in (one, other))
    if paired:
        return rms(one.estimates((x - y) @ (x - y).T))
    squares = one.estimates(x @ x.T), other.estimates(y @ y.T)
    x_means, y_means = one.maps.without_each(x), other.maps.without_each(y)
    x_y, y_x = (x_means * y_means[0]).mean(-1), (y_means * x_means[0]).mean(-1)
    # <x, x> - 2 <x, y> + <y, y>: the folds of x and of y vary independently.
    arms = [
        jackknife(square.with_values(square.values - 2 * crossed))
        for square, crossed in zip(squares, (x_y, y_x), strict=True)
    ]
    half = hypot(*(arm.high - arm.value for arm in arms))
    square = float(squares[0].values[0] - 2 * x_y[0] + squares[1].values[0])
    return Interval(
        value=signed_root(square), low=signed_root(square - half), high=signed_root(square + half)
    )


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
