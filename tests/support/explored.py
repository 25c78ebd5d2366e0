"""Random maps under removals for the explorer."""

from typing import Any

import numpy as np

from nope_probe.figures.explorer import MEASURES, Explorer, RemovedMaps

N, LAYERS, HEADS = 7, 2, 3
CONDITIONS = ("intact", "mask", "rope", "mask+rope", "w_o+w_v")
LABELS = ("nothing", "causal mask", "RoPE", "mask + RoPE", "OV")


def view(n: int = N, layers: int = LAYERS) -> RemovedMaps:
    """Return random patterns below the diagonal, without a first key, and random leads."""
    generator = np.random.default_rng(7)
    panels = tuple(f"H{head}" for head in range(HEADS))
    maps = generator.normal(size=(len(CONDITIONS), layers, len(panels), n, n))
    maps[..., ~np.tri(n, k=-1, dtype=bool)] = np.nan
    maps[..., 0] = np.nan
    leads = 50 * generator.normal(size=maps.shape[:4])
    leads[..., :2] = np.nan
    measures = generator.normal(size=(*maps.shape[:3], len(MEASURES), 3))
    measures[1, 0, 0, 2] = np.nan  # a pattern that is not defined
    return RemovedMaps(
        conditions=CONDITIONS,
        labels=LABELS,
        layers=tuple(range(layers)),
        panels=panels,
        maps=maps,
        leads=leads,
        measures=measures,
    )


def explorer(**changes: Any) -> Explorer:
    return Explorer(**{"title": "<title>", "view": view(), **changes})
