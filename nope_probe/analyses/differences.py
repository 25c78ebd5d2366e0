"""Differences between two models' positional patterns, with 95% intervals.

Where both models ran on the same sequences, dealt to the same folds, differences are taken fold by
fold (paired): what the sequences have in common cancels. Elsewhere variances add up.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    cross_products,
    jackknife,
    leave_one_out,
    rms,
    signed_root,
)
from nope_probe.analyses.pattern import kept_cells, measure_estimates, row_centred

Folds = Float[Tensor, "fold query_pos key_pos"]
OtherFolds = Float[Tensor, "other_fold query_pos key_pos"]
Estimates = dict[str, Float[Tensor, " one_plus_folds"]]


def measure_differences(
    one: Folds, other: OtherFolds, *, skip_keys: int = 0, paired: bool
) -> dict[str, Interval]:
    """Return by how much the measures of one model's pattern exceed those of another's.

    Args:
        one: fold means of scores of one layer, nats.
        other: those of the model to compare with.
        skip_keys: how many first keys to leave out.
        paired: whether fold f holds the same sequences in both.

    Returns:
        Differences by the names of `Measures`, undefined where a share is; and `difference`, the
        RMS of the difference of the two patterns, nats, corrected for noise.

    Example:
        >>> import torch
        >>> folds = torch.randn(4, 13, 13, generator=torch.Generator().manual_seed(0))
        >>> found = measure_differences(folds + 1, folds, paired=True)
        >>> abs(found["difference"].value) < 1e-6, abs(found["locality"].value) < 1e-6
        (True, True)
    """
    one, other = one.double(), other.double()
    estimates = _estimates(one, skip_keys), _estimates(other, skip_keys)
    found = {"difference": pattern_difference(one, other, skip_keys=skip_keys, paired=paired)}
    for name in (each for each in estimates[0] if each in estimates[1]):
        x, y = (each[name] for each in estimates)
        found[name] = (
            jackknife(x - y) if paired else independent_difference(jackknife(x), jackknife(y))
        )
    return {**found, **({} if "relative_r2" in found else {"relative_r2": UNDEFINED})}


def pattern_difference(
    one: Folds, other: OtherFolds, *, skip_keys: int = 0, paired: bool
) -> Interval:
    """Return the RMS of the difference of two patterns, nats, with noise subtracted."""
    cells = kept_cells(one.shape[-1], skip_keys)
    x, y = (row_centred(each.double(), skip_keys)[:, cells] for each in (one, other))
    if paired:
        difference = (x - y)[None]
        return rms(cross_products(difference, difference)[:, 0, 0])
    x_x, y_y = (cross_products(each[None], each[None])[:, 0, 0] for each in (x, y))
    x_y = (leave_one_out(x) * y.mean(0)).mean(-1)
    y_x = (leave_one_out(y) * x.mean(0)).mean(-1)
    # <x, x> - 2 <x, y> + <y, y>: one term varies with the folds of x, the other with those of y.
    varies = jackknife(x_x - 2 * x_y), jackknife(y_y - 2 * y_x)
    square = float(x_x[0] - 2 * x_y[0] + y_y[0])
    half = _arm(*varies)
    return Interval(
        value=signed_root(square), low=signed_root(square - half), high=signed_root(square + half)
    )


def independent_difference(one: Interval, other: Interval) -> Interval:
    """Return the difference of estimates from independent data: their arms add in squares."""
    value, half = one.value - other.value, _arm(one, other)
    return Interval(value=value, low=value - half, high=value + half)


def _arm(*intervals: Interval) -> float:
    """Return the half width of a sum or difference of independent estimates."""
    return float(sum((each.high - each.value) ** 2 for each in intervals) ** 0.5)


def _estimates(folds: Folds, skip_keys: int) -> Estimates:
    """Return the measures on all folds and without each; the relative share if it is defined."""
    found = measure_estimates(folds, skip_keys)
    p_p, r_r = found.pop("amplitude_squared"), found.pop("non_relative_squared")
    found["amplitude"], found["non_relative"] = _roots(p_p), _roots(r_r)
    if jackknife(p_p).low > 0:
        found["relative_r2"] = 1 - r_r / p_p
    return found


def _roots(squares: Float[Tensor, " one_plus_folds"]) -> Float[Tensor, " one_plus_folds"]:
    return squares.sign() * squares.abs().sqrt()
