"""Estimates with 95% intervals in tables: their columns, as text, as error bars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.words import NO_PATTERN, NO_SHARE, WITHIN, Column

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


def excludes_zero(table: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Return, for each row of a table, whether an estimate's interval excludes zero.

    Example:
        >>> table = pd.DataFrame({"share_low": [0.1, -0.1], "share_high": [0.3, 0.2]})
        >>> excludes_zero(table, "share").tolist()
        [True, False]
    """
    low, high = bound_columns(column)
    return (table[low] > 0) | (table[high] < 0)


def interval_text(interval: ValueAndBounds, style: str, unit: str = "") -> str:
    """Return an estimate and its bounds as text, or `no pattern` without an estimate.

    Args:
        interval: estimate, lower and upper bound.
        style: the format of each number.
        unit: the text after the estimate.

    Example:
        >>> interval_text((0.5, 0.4, 0.625), ".2f", " nats")
        '0.50 nats [0.40, 0.62]'
    """
    value, low, high = interval
    if np.isnan(value):
        return NO_PATTERN
    return f"{value:{style}}{unit} [{low:{style}}, {high:{style}}]"


def column_text(
    row: Mapping[Any, Any] | pd.Series, name: str, about: Column, style: str = ""
) -> str:
    """Return a number of a table's row as its column is declared, with its interval if it has one.

    Args:
        row: of a table.
        name: the column's.
        about: a share is shown in percent, an RMS where it exceeds the noise.
        style: the format of each number; empty for three digits, or a tenth of a percent.

    Example:
        >>> row = {"kept": 0.5, "kept_low": 0.4, "kept_high": 0.6}
        >>> column_text(row, "kept", Column("kept", unit="share"))
        '50.0% [40.0, 60.0]'
        >>> column_text({"layer": 1}, "layer", Column("layer"))
        '1'
    """
    value, has_bounds = row[name], {*bound_columns(name)} <= {*row.keys()}
    if value is None or value is pd.NA or value != value:
        return about.blank
    if not (has_bounds or isinstance(value, float)):
        return str(value)
    numbers = [*interval_of(row, name)] if has_bounds else [value]
    if about.noise and has_bounds and numbers[1] <= 0:
        return about.noise
    if about.is_share:
        numbers, style = [100 * number for number in numbers], style or "z.1f"
    text, *ends = (f"{number:{style}}" if style else number_text(number) for number in numbers)
    interval = f" [{', '.join(ends)}]" if ends else ""
    return f"{text}{'%' * about.is_share}{interval}"


def numbers_as_text(table: pd.DataFrame, columns: Mapping[str, Column] = {}) -> pd.DataFrame:
    """Return a table as text: an estimate and its bounds are one cell; see `column_text`.

    Args:
        table: numbers, some with their bounds.
        columns: the declared columns by name.

    Example:
        >>> table = pd.DataFrame({"layer": [1], "rms": [2.0], "rms_low": [1.5], "rms_high": [2.5]})
        >>> numbers_as_text(table).to_dict("records")
        [{'layer': '1', 'rms': '2 [1.5, 2.5]'}]
    """
    rows, names = table.to_dict("records"), [*map(str, table)]
    bounds = [{*bound_columns(name)} for name in names]
    hidden = {bound for of_name in bounds if of_name <= {*names} for bound in of_name}
    return pd.DataFrame(
        {
            name: [column_text(row, name, columns.get(name, Column(name))) for row in rows]
            for name in names
            if name not in hidden
        }
    )


def is_number(text: str) -> bool:
    """Return whether a cell's text is a number, blank, or a word in place of a number.

    Example:
        >>> is_number("-3% [-4, -2]"), is_number("needed")
        (True, False)
    """
    return not text or text[0] in "+-0123456789" or text in (NO_PATTERN, WITHIN, NO_SHARE)


def estimates_of(rows: pd.DataFrame, column: str) -> Float[np.ndarray, "3 row"]:
    """Return the estimates, the lower and the upper bounds of a table's rows."""
    return rows[[column, *bound_columns(column)]].to_numpy(float).T


def error_bars(values: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> dict[str, object]:
    """Return plotly's error bars between the bounds of estimates."""
    arms = {"array": highs - values, "arrayminus": values - lows}
    return {"type": "data", "symmetric": False, **arms, "thickness": 1.5, "width": 3}


# A map or curve is noise if it spans less than this many standard errors, or nats (the resolution
# of scores in float32). Its colours or axis then span this many times as much.
NOISE_ERRORS, NOISE_NATS, WIDER = 8, 1e-5, 10
ROUNDING = 1e-12  # smaller numbers are rounding errors of float64
PALE = 3  # standard errors of a cell that signed colours span at least
FLOOR = 0.01  # nats, or a share: attention weights change by 1% per hundredth of a nat
MARGIN = 3.0  # half an axis, in units of the largest noise
FLAT = "flat: within noise"
FLAT_WORDS = ": flat, within noise"  # after a panel's title

Numbers = Float[np.ndarray, "..."] | Sequence[float]


def number_text(value: float) -> str:
    """Return a number of a table with three digits; rounding errors of float64 are 0.

    Example:
        >>> number_text(0.12345), number_text(-1.35e-17)
        ('0.123', '0')
    """
    return f"{value:.3g}" if abs(value) > ROUNDING else "0"


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


CLIPPED = 0.5  # percent of the cells beyond each limit


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
