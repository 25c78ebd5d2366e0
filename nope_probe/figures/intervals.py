"""Estimates with 95% intervals, as tables hold them: their columns, as text, as error bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

NO_PATTERN = "no pattern"
ValueAndBounds = tuple[float, float, float]


def bound_columns(column: str) -> tuple[str, str]:
    """Return the columns with an estimate's bounds.

    Example:
        >>> bound_columns("share")
        ('share_low', 'share_high')
    """
    return f"{column}_low", f"{column}_high"


def interval_of(row: Mapping[Any, Any] | pd.Series, column: str) -> ValueAndBounds:
    """Return an estimate of a table's row with its bounds."""
    low, high = bound_columns(column)
    return float(row[column]), float(row[low]), float(row[high])


def interval_text(interval: ValueAndBounds, style: str = "z.3f", unit: str = "") -> str:
    """Return an estimate and its bounds as text, or `no pattern` where there is none.

    Args:
        interval: estimate, lower and upper bound.
        style: the format of each number.
        unit: what follows the estimate.

    Example:
        >>> interval_text((0.5, 0.4, 0.625), ".2f", " nats")
        '0.50 nats [0.40, 0.62]'
    """
    value, low, high = interval
    if np.isnan(value):
        return NO_PATTERN
    return f"{value:{style}}{unit} [{low:{style}}, {high:{style}}]"


def percent(interval: ValueAndBounds) -> ValueAndBounds:
    """Return a share with its bounds in percent."""
    value, low, high = interval
    return 100 * value, 100 * low, 100 * high


def error_bars(values: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> dict[str, object]:
    """Return plotly's error bars between the bounds of estimates."""
    arms = {"array": highs - values, "arrayminus": values - lows}
    return {"type": "data", "symmetric": False, **arms, "thickness": 1.5, "width": 3}
