"""What a run of `scores` found, one sentence per section: the headings of its page."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.findings import NO_PATTERN, NOISE, preferred_keys
from nope_probe.experiments.summary import strongest
from nope_probe.experiments.wording import percents
from nope_probe.figures.heads import ABOUT

Map = Float[np.ndarray, "query_pos key_pos"]


def pattern_finding(pattern: pd.DataFrame) -> str:
    """Return where the positional pattern is strongest, and which keys it prefers there.

    Args:
        pattern: `pattern.csv`, a row per layer.
    """
    best = strongest(pattern)
    if best is None:
        return NO_PATTERN
    where = f"L{best['layer']:.0f}, {best['amplitude']:.2g} nats"
    keys = preferred_keys(best)
    prefers = f"prefers {keys} keys" if keys else "prefers neither near nor far keys"
    return f"The positional pattern is strongest in {where}, and {prefers} there"


def level_finding(scores: Map, pattern: Map, layer: int) -> str:
    """Return how much of the variance of a layer's mean scores is that of its row means.

    Args:
        scores: the layer's mean scores.
        pattern: the positional pattern, NaN where it is not defined; those cells do not count.
        layer: its number.
    """
    cells = np.isfinite(pattern) & np.isfinite(scores)
    variance = float(np.var(scores[cells])) if cells.any() else 0.0
    if not variance > 0:
        return f"Mean scores: those of L{layer} do not differ"
    level = 1 - float(np.mean(pattern[cells] ** 2)) / variance
    share = percents(min(1.0, max(0.0, level)))
    return f"Mean scores: {share} of L{layer}'s variance is row means, which softmax ignores"


def distance_finding(pattern: pd.DataFrame) -> str:
    """Return how much of the strongest layer's positional pattern is a function of the distance.

    Args:
        pattern: `pattern.csv`, a row per layer.
    """
    topic, best = "Diagonal-normalised scores", strongest(pattern)
    if best is None or np.isnan(best["relative_r2"]):
        return f"{topic}: what is no function of the distance is {NOISE}"
    share = percents(best["relative_r2"])
    return f"{topic}: distance alone explains {share} of L{best['layer']:.0f}'s positional pattern"


def head_finding(heads: pd.DataFrame, measure: str) -> str:
    """Return in which head a measure is clearest.

    Args:
        heads: `heads.csv`, a row per layer and head.
        measure: one of its columns, of `figures.heads.ABOUT`.
    """
    about = ABOUT[measure]
    low, high = heads[f"{measure}_low"], heads[f"{measure}_high"]
    clear = heads[(low > 0) | (high < 0)]
    if clear.empty:
        return f"Heads: {about.label} is {NOISE}"
    top = clear.iloc[int(clear[measure].abs().to_numpy(float).argmax())]
    most, style = ("farthest from 0", "+.2g") if about.signed else ("largest", ".2g")
    name = f"L{top['layer']:.0f}H{top['head']:.0f}"
    unit = " nats" if about.unit == "nats" else ""
    return f"Heads: {about.label} is {most} in {name}, {top[measure]:{style}}{unit}"
