"""What the circuit figure shows: a block's maps, and the ways to look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from nope_probe.figures.downsample import pool

SCORES = "bi"
RAW, DIAGONAL, CHANGE = "raw", "less diagonal means", "change"
MAX_POSITIONS = 128
MIDDLE = (5, 95)  # percentiles of the cells off the diagonal, between which colours run


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """What the circuit figure shows of one block.

    Attributes:
        layer: the block's number, from 0.
        maps: per letter its Gram map, or score map in nats for (b) and (i); NaN where masked.
        absent: per letter that the block lacks, why.
        components: what the model has, such as `mask`, `rope`, `w_q`.
        removed: what an ablation took away.
        reference: the intact model's maps, for the change against it; empty without ablation.
    """

    layer: int
    maps: Mapping[str, Float[np.ndarray, "query_pos key_pos"]]
    absent: Mapping[str, str] = field(default_factory=dict)
    components: Sequence[str] = ()
    removed: Sequence[str] = ()
    reference: Mapping[str, Float[np.ndarray, "query_pos key_pos"]] = field(default_factory=dict)


def views(data: Circuit) -> tuple[str, ...]:
    """Name the ways to look at a block: the change only where there is something to compare."""
    return (RAW, DIAGONAL, CHANGE) if data.reference else (RAW, DIAGONAL)


def cells(data: Circuit, view: str, max_positions: int) -> dict[str, tuple[np.ndarray, int]]:
    """Give each stage's values in one view, pooled, with the positions per block."""
    found = {}
    for letter in sorted(data.maps):
        values = np.asarray(data.maps[letter])
        if view == DIAGONAL:
            values = diagonal_normalised(values)
        if view == CHANGE:
            values = values - np.asarray(data.reference[letter])
        pooled = pool(values[None], max_positions)
        found[letter] = pooled.values[0], pooled.block
    return found


def diagonal_normalised(
    values: Float[np.ndarray, "query_pos key_pos"],
) -> Float[np.ndarray, "query_pos key_pos"]:
    """Take from each cell the mean of its diagonal, over cells with a number.

    Example:
        >>> diagonal_normalised(np.array([[1.0, 0.0], [5.0, 3.0]]))
        array([[-1.,  0.],
               [ 0.,  1.]])
    """
    n = len(values)
    lag = np.subtract.outer(np.arange(n), np.arange(n)) + n - 1
    known = np.isfinite(values)
    sums = np.bincount(lag[known], values[known], minlength=2 * n - 1)
    counts = np.bincount(lag[known], minlength=2 * n - 1)
    return values - (sums / np.maximum(counts, 1))[lag]


def limits(values: np.ndarray, view: str) -> tuple[float, float]:
    """Give colour limits: the middle 90% of the cells off the diagonal, around 0 unless raw."""
    off = values[np.isfinite(values) & ~np.eye(len(values), dtype=bool)]
    off = off if off.size else values[np.isfinite(values)]
    if not off.size:
        return 0.0, 1.0
    if view != RAW:
        top = float(np.percentile(np.abs(off), MIDDLE[1])) or 1.0
        return -top, top
    low, high = np.percentile(off, MIDDLE)
    return float(low), float(high)


def group_limits(letter: str, scales: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """Give the limits that hold all maps of a kind: inner products, or scores."""
    group = [each for name, each in scales.items() if (name in SCORES) == (letter in SCORES)]
    return min(low for low, _ in group), max(high for _, high in group)
