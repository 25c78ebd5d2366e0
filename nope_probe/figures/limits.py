"""The colour limits of maps: percentiles, symmetric around zero, and those of flat layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float

from nope_probe.figures.noise import FLOOR

CLIPPED = 0.5  # percent of the cells beyond each limit


def percentiles(values: Float[np.ndarray, "..."], at: Sequence[float]) -> Float[np.ndarray, " at"]:
    """Return percentiles of the finite values, 0 where there is none."""
    known = values[np.isfinite(values)]
    return np.percentile(known, at) if known.size else np.zeros(len(at))


def symmetric(values: Float[np.ndarray, "..."], floor: float) -> float:
    """Return how far limits around zero reach: to all but the strongest values, at least a floor.

    Example:
        >>> symmetric(np.array([-2.0, np.nan, 2.0]), 0.1), symmetric(np.zeros(3), 0.1)
        (2.0, 0.1)
    """
    return max(floor, float(percentiles(np.abs(values), (100 - CLIPPED,))[0]))


def flattened(tops: Sequence[float], flat: Collection[int]) -> Float[np.ndarray, "layer 2"]:
    """Return each layer's limits around zero; flat layers have those of the strongest layer.

    Example:
        >>> flattened([1e-7, 2.0, 3.0], flat=[0]).tolist()
        [[-3.0, 3.0], [-2.0, 2.0], [-3.0, 3.0]]
    """
    clear = [top for layer, top in enumerate(tops) if layer not in flat]
    widest = max([FLOOR, *clear])
    shown = [max(top, widest) if layer in flat else top for layer, top in enumerate(tops)]
    return np.array([[-top, top] for top in shown])
