"""Two numbers compared by the function that compares arrays of them."""

from typing import NamedTuple

import numpy as np

from nope_probe.analyses.differences import Numbers, compare_numbers
from nope_probe.analyses.jackknife import Interval


class Difference(NamedTuple):
    """The difference of two numbers, its test, and whether it was paired."""

    interval: Interval
    p: float
    method: str | None


def as_numbers(interval: Interval) -> Numbers:
    """Return an interval as an array of one number, which has 17 folds of weight 0 if none."""
    replicates, weights = np.full((1, 18), np.nan), np.zeros((1, 17))
    if interval.replicates is not None:
        replicates = interval.replicates.values.double().numpy()[None]
        weights = interval.replicates.weights.double().numpy()[None]
    return Numbers(ends=np.array([interval.ends]), replicates=replicates, weights=weights)


def compare(base: Interval, other: Interval, *, paired: bool, is_rms: bool = False) -> Difference:
    """Return `other` less `base`."""
    sides = map(as_numbers, (base, other))
    [row] = compare_numbers(*sides, paired=paired, is_rms=np.array([is_rms])).to_dict("records")
    value, low, high = (row[f"difference{end}"] for end in ("", "_low", "_high"))
    return Difference(Interval(value=value, low=low, high=high), row["p"], row["method"])
