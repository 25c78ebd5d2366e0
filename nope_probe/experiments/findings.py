"""What measures of the positional pattern say, as headings of any command's page."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from nope_probe.experiments.wording import numbered_layers

NOISE = "not distinguishable from noise"
NO_PATTERN = f"The positional pattern is {NOISE} in any layer"


def preferred_keys(row: Mapping[str, float] | pd.Series) -> str:
    """Return which keys a row's pattern prefers: near, far, or neither, an empty word."""
    if row["locality_low"] > 0:
        return "near"
    return "far" if row["locality_high"] < 0 else ""


def measure_finding(pattern: pd.DataFrame) -> str:
    """Return in which layers near keys are preferred, and in which far ones.

    Args:
        pattern: the measures of one model, a row per layer.
    """
    above = pattern[pattern["amplitude_low"] > 0]
    if above.empty:
        return f"Measures: the positional pattern is {NOISE} in any layer"
    kinds: dict[str, list[int]] = {"near": [], "far": [], "": []}
    for _, row in above.iterrows():
        kinds[preferred_keys(row)].append(int(row["layer"]))
    names = {"near": "near keys", "far": "far keys", "": "neither near nor far keys"}
    parts = [f"{names[kind]} in {numbered_layers(at)}" for kind, at in kinds.items() if at]
    return f"Measures: attention prefers {', '.join(parts)}"
