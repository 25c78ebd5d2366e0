"""Differences between two models' positional patterns, with 95% intervals.

Where both models ran on the same sequences, dealt to the same folds, differences are taken fold by
fold (paired): what the sequences have in common cancels. Elsewhere variances add up.
"""

from __future__ import annotations

from math import hypot

from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.conditions import FoldCounts
from nope_probe.analyses.estimates import measure_estimates
from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    cross_products,
    jackknife,
    leave_one_out,
    rms,
    signed_root,
)
from nope_probe.analyses.pattern import kept_cells, row_centred

Folds = Float[Tensor, "fold query_pos key_pos"]
OtherFolds = Float[Tensor, "other_fold query_pos key_pos"]
BothCounts = tuple[FoldCounts | None, FoldCounts | None]
Estimates = dict[str, Float[Tensor, " one_plus_folds"]]


def measure_differences(
    one: Folds,
    other: OtherFolds,
    *,
    skip_keys: int = 0,
    paired: bool,
    counts: BothCounts = (None, None),
) -> dict[str, Interval]:
    """Return by how much the measures of one model's pattern exceed those of another's.

    Args:
        one: fold means of scores of one layer, nats.
        other: those of the model to compare with.
        skip_keys: how many first keys to leave out.
        paired: whether fold f holds the same sequences in both.
        counts: of each model, the sequences per fold; all the same by default.

    Returns:
        Differences by the names of `Measures`, undefined where a share is.

    Example:
        >>> import torch
        >>> folds = torch.randn(4, 13, 13, generator=torch.Generator().manual_seed(0))
        >>> found = measure_differences(folds + 1, folds, paired=True)
        >>> abs(found["amplitude"].value) < 1e-6, abs(found["locality"].value) < 1e-6
        (True, True)
    """
    x = _estimates(one.double(), skip_keys, counts[0])
    y = _estimates(other.double(), skip_keys, counts[1])
    found = {"relative_r2": UNDEFINED}
    for name in (each for each in x if each in y):
        if paired:
            found[name] = jackknife(x[name] - y[name], counts[0])
        else:
            alone = jackknife(x[name], counts[0]), jackknife(y[name], counts[1])
            found[name] = independent_difference(*alone)
    return found


def pattern_difference(
    one: Folds,
    other: OtherFolds,
    *,
    skip_keys: int = 0,
    paired: bool,
    counts: BothCounts = (None, None),
) -> Interval:
    """Return the RMS of the difference of two patterns, nats, with noise subtracted.

    Arguments are those of `measure_differences`.
    """
    cells = kept_cells(one.shape[-1], skip_keys)
    x, y = (row_centred(each.double(), skip_keys)[:, cells] for each in (one, other))
    n_x, n_y = counts
    if paired:
        difference = (x - y)[None]
        return rms(cross_products(difference, difference, n_x)[:, 0, 0], n_x)
    x_x = cross_products(x[None], x[None], n_x)[:, 0, 0]
    y_y = cross_products(y[None], y[None], n_y)[:, 0, 0]
    x_means, y_means = leave_one_out(x, n_x), leave_one_out(y, n_y)
    x_y, y_x = (x_means * y_means[0]).mean(-1), (y_means * x_means[0]).mean(-1)
    # <x, x> - 2 <x, y> + <y, y>: one term varies with the folds of x, the other with those of y.
    arms = (
        jackknife(estimates, counts)
        for estimates, counts in ((x_x - 2 * x_y, n_x), (y_y - 2 * y_x, n_y))
    )
    half = hypot(*(each.high - each.value for each in arms))
    square = float(x_x[0] - 2 * x_y[0] + y_y[0])
    return Interval(
        value=signed_root(square), low=signed_root(square - half), high=signed_root(square + half)
    )


def independent_difference(one: Interval, other: Interval) -> Interval:
    """Return the difference of estimates from independent data.

    Its arms are those of the two in squares: down where one is lower or the other higher, and up
    where it is the other way round (Zou and Donner 2008), since the interval of an RMS or a ratio
    is longer on one side.

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


def _estimates(folds: Folds, skip_keys: int, counts: FoldCounts | None) -> Estimates:
    """Return the measures on all folds and without each; the relative share if it is defined."""
    found = measure_estimates(folds, skip_keys, counts)
    p_p, r_r = found.pop("amplitude_squared"), found.pop("non_relative_squared")
    found["amplitude"], found["non_relative"] = _roots(p_p), _roots(r_r)
    if jackknife(p_p, counts).low > 0:
        found["relative_r2"] = 1 - r_r / p_p
    return found


def _roots(squares: Float[Tensor, " one_plus_folds"]) -> Float[Tensor, " one_plus_folds"]:
    return squares.sign() * squares.abs().sqrt()
