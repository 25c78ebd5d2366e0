"""The limits of axes and of colours: around zero, wide enough that noise looks flat."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float

from nope_probe.figures.words import CLIPPED

# A map or curve is noise if it spans less than this many standard errors, or nats (the resolution
# of scores in float32). Its colours or axis then span this many times as much.
NOISE_ERRORS, NOISE_NATS, WIDER = 8, 1e-5, 10
PALE = 3  # standard errors of a cell that signed colours span at least
FLOOR = 0.01  # nats, or a share: attention weights change by 1% per hundredth of a nat
MARGIN = 3.0  # half an axis, in units of the largest noise
FLAT = "flat: within noise"
FLAT_WORDS = ": flat, within noise"  # after a panel's title

Numbers = Float[np.ndarray, "..."] | Sequence[float]


def finite(values: Numbers | Sequence[Numbers]) -> Float[np.ndarray, " number"]:
    """Return the numbers that are finite, without their shape."""
    numbers = np.asarray(values, float)
    return numbers[np.isfinite(numbers)]


def reach_of(values: Numbers) -> float:
    """Return the largest absolute value of the finite numbers, at least `FLOOR`."""
    return max(FLOOR, float(np.abs(finite(values)).max(initial=0.0)))


def is_noise(values: Numbers, lows: Numbers, highs: Numbers) -> bool:
    """Return whether there are numbers, all with intervals that include zero."""
    known = np.isfinite(np.asarray(values, float))
    clear = (np.asarray(lows, float) > 0) | (np.asarray(highs, float) < 0)
    return bool(known.any()) and not bool((known & clear).any())


def axis_range(values: Numbers, lows: Numbers, highs: Numbers) -> tuple[float, float] | None:
    """Return the range of an axis with zero, or None if the numbers themselves give a good range.

    Numbers within their noise fill a third of the axis around zero, and no axis spans less than
    `FLOOR`.

    Args:
        values: estimates; NaN without an estimate.
        lows: lower bounds.
        highs: upper bounds.

    Example:
        >>> axis_range([2e-7, -1e-7], [-2e-7, -3e-7], [4e-7, 1e-7])
        (-0.01, 0.01)
        >>> axis_range([0.5, -0.2], [-0.3, -0.7], [1.0, 0.3])
        (-3.0, 3.0)
        >>> axis_range([0.5], [0.4], [0.6]) is None
        True
    """
    known = finite([values, lows, highs])
    largest = float(np.abs(known).max(initial=0.0))
    if not known.size:
        return None
    if is_noise(values, lows, highs):
        top = max(MARGIN * largest, FLOOR)
        return -top, top
    return (0.0 if known.min() >= 0 else -FLOOR, FLOOR) if largest < FLOOR else None


def padded_range(ends: Numbers) -> tuple[float, float] | None:
    """Return an axis's range from zero to all numbers and a twentieth more; None without numbers.

    Example:
        >>> padded_range([0.5, 2.0, np.nan]), padded_range([np.nan])
        ((0.0, 2.1), None)
    """
    known = finite(ends)
    if not known.size:
        return None
    low, high = min(0.0, float(known.min())), max(0.0, float(known.max()))
    pad = 0.05 * (high - low)
    return (low - pad if low < 0 else 0.0), (high + pad if high > 0 else 0.0)


def widened(low: float, high: float, floor: float = NOISE_NATS) -> tuple[float, float, bool]:
    """Return limits, widened if they differ by less than `floor`, and whether they were widened.

    Example:
        >>> widened(1.0, 3.0, floor=1.0)
        (1.0, 3.0, False)
        >>> widened(2.0, 2.0, floor=1.0)
        (-3.0, 7.0, True)
    """
    if high - low >= floor:
        return low, high, False
    centre, half = (low + high) / 2, WIDER * floor / 2
    return centre - half, centre + half, True


def percentiles(values: Float[np.ndarray, "..."], at: Sequence[float]) -> Float[np.ndarray, " at"]:
    """Return percentiles of the finite values, 0 without finite values."""
    known = values[np.isfinite(values)]
    return np.percentile(known, at) if known.size else np.zeros(len(at))


def symmetric(values: Float[np.ndarray, "..."], floor: float, beyond: float = CLIPPED) -> float:
    """Return the reach of limits around zero, at least the floor.

    Args:
        values: of a map.
        floor: the smallest reach.
        beyond: percent of the strongest values that are left out.

    Example:
        >>> symmetric(np.array([-2.0, np.nan, 2.0]), 0.1), symmetric(np.zeros(3), 0.1)
        (2.0, 0.1)
    """
    return max(floor, float(percentiles(np.abs(values), (100 - beyond,))[0]))


def flattened(tops: Sequence[float], flat: Collection[int]) -> Float[np.ndarray, "layer 2"]:
    """Return each layer's limits around zero; flat layers get the strongest layer's limits.

    Example:
        >>> flattened([1e-7, 2.0, 3.0], flat=[0]).tolist()
        [[-3.0, 3.0], [-2.0, 2.0], [-3.0, 3.0]]
    """
    clear = [top for layer, top in enumerate(tops) if layer not in flat]
    widest = max([FLOOR, *clear])
    shown = [max(top, widest) if layer in flat else top for layer, top in enumerate(tops)]
    return np.array([[-top, top] for top in shown])
