"""Spearman's rank correlation of two lists of numbers, with its p value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_PAIRS = 5


@dataclass(frozen=True, kw_only=True)
class RankCorrelation:
    """Spearman's rho over n pairs; NaN for fewer than 5 pairs, or where one list is constant."""

    rho: float
    p: float
    n: int


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> RankCorrelation:
    """Return Spearman's rho of the pairs that are both finite; p is two-sided, for rho = 0.

    Example:
        >>> found = rank_correlation([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 4.0, 9.0, 16.0, 25.0])
        >>> round(found.rho, 6), found.n
        (1.0, 5)
    """
    from scipy.stats import spearmanr

    pairs = np.array([x, y], float)
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    n = pairs.shape[1]
    if n < MIN_PAIRS or (np.ptp(pairs, 1) == 0).any():
        return RankCorrelation(rho=float("nan"), p=float("nan"), n=n)
    found = spearmanr(*pairs)
    return RankCorrelation(rho=float(found.statistic), p=float(found.pvalue), n=n)
