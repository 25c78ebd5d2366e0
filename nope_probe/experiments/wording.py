"""Pieces of the sentences on a run's findings: headings, headlines, tables in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, SupportsFloat

import numpy as np
import pandas as pd

from nope_probe.figures.intervals import excludes_zero, interval_of, interval_text
from nope_probe.figures.words import numbered_layers

NOISE = "not distinguishable from noise"
NO_PATTERN = f"The positional pattern is {NOISE} in any layer"


def capitalised(text: str) -> str:
    """Return a text with its first letter large, and all others unchanged.

    Example:
        >>> capitalised("the causal mask"), capitalised("RoPE")
        ('The causal mask', 'RoPE')
    """
    return text[:1].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    """Return parts as a list in a sentence.

    Example:
        >>> listed(["mask"]), listed(["mask", "RoPE", "W_Q"])
        ('mask', 'mask, RoPE and W_Q')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def percents(share: SupportsFloat) -> str:
    """Return a share in whole percents, below 1% in tenths.

    Example:
        >>> percents(0.984), percents(0.004), percents(0.0), percents(-0.12)
        ('98%', '0.4%', '0%', '-12%')
    """
    value = 100 * float(share)
    return f"{value:.1f}%" if 0.05 <= abs(value) < 0.95 else f"{value:z.0f}%"


def strongest(rows: pd.DataFrame) -> pd.Series | None:
    """Return the row with the largest amplitude that exceeds its noise, if there is one.

    Args:
        rows: `pattern.csv` of one model, one row per layer.
    """
    above = rows[rows["amplitude_low"] > 0]
    return None if above.empty else above.sort_values("amplitude").iloc[-1]


def preference(row: Mapping[Any, Any] | pd.Series) -> str:
    """Return which keys a pattern prefers, with the number that shows it, where there is one."""
    if isnan(row["locality"]):
        return "has too few keys per query to rank them"
    keys = "near" if row["locality"] > 0 else "far"
    return f"prefers {keys} keys (rank correlation with the key's position {row['locality']:+.2f})"


def nats(row: Mapping[Any, Any] | pd.Series, column: str) -> str:
    """Return an estimate of a table's row with its interval, to a thousandth."""
    return interval_text(interval_of(row, column))


def preferred_keys(row: Mapping[str, float] | pd.Series) -> str:
    """Return which keys a row's pattern prefers: near, far, or neither, an empty word."""
    if row["locality_low"] > 0:
        return "near"
    return "far" if row["locality_high"] < 0 else ""


def measure_finding(pattern: pd.DataFrame) -> str:
    """Return the layers that prefer near keys, and the layers that prefer far keys.

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


def of_layer(table: pd.DataFrame, layer: int | None) -> pd.DataFrame:
    """Return a table's rows of one layer; none if there is no such layer."""
    return table[table["layer"] == (-1 if layer is None else layer)]


def largest(table: pd.DataFrame, column: str) -> pd.Series:
    """Return the row with the largest absolute value."""
    return table.iloc[int(np.argmax(table[column].abs().to_numpy(float)))]


def noisy_layers(table: pd.DataFrame, name: str, column: str) -> dict[str, list[int]]:
    """Return per item of a table the layers in which its estimate does not exceed the noise.

    Args:
        table: `layer`, the items' column, and the estimate with its bounds.
        name: the items' column.
        column: the estimate; an item is above the noise where its interval excludes zero.
    """
    flat = table[~excludes_zero(table, column)]
    return {
        str(item): [int(layer) for layer in flat[flat[name] == item]["layer"]]
        for item in table[name].unique()
    }
