"""Estimates with 95% intervals in tables: their columns, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from nope_probe.figures.words import NO_PATTERN, NO_SHARE, WITHIN, Column

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from jaxtyping import Float

ROUNDING = 1e-12  # smaller numbers are rounding errors of float64
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
        >>> import pandas as pd
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
    if isnan(value):
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
        style: the format of each number; empty for three digits, or a tenth of a percent. After
            `±`, that of the number, and half the width of its interval follows.

    Example:
        >>> row = {"kept": 0.5, "kept_low": 0.4, "kept_high": 0.6}
        >>> column_text(row, "kept", Column("kept", unit="share"))
        '50.0% [40.0, 60.0]'
        >>> column_text(row, "kept", Column("kept"), "±.2f")
        '0.50±0.10'
        >>> column_text({"layer": 1}, "layer", Column("layer"))
        '1'
    """
    import pandas as pd

    value, has_bounds = row[name], {*bound_columns(name)} <= {*row.keys()}
    if value is None or value is pd.NA or value != value:
        return about.blank
    if not (has_bounds or isinstance(value, float)):
        return str(value)
    numbers = [*interval_of(row, name)] if has_bounds else [value]
    if about.noise and has_bounds and numbers[1] <= 0 and row.get("of") != "lead":
        return about.noise
    if style.startswith("±"):
        value, low, high = numbers
        return f"{value:{style[1:]}}±{max(value - low, high - value):.2f}"
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
        >>> import pandas as pd
        >>> table = pd.DataFrame({"layer": [1], "rms": [2.0], "rms_low": [1.5], "rms_high": [2.5]})
        >>> numbers_as_text(table).to_dict("records")
        [{'layer': '1', 'rms': '2 [1.5, 2.5]'}]
    """
    import pandas as pd

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


def above_noise(table: pd.DataFrame, columns: Mapping[str, Column]) -> pd.DataFrame:
    """Return a table in which an RMS within its noise is 0, for figures: its square can be below.

    Args:
        table: numbers with their bounds.
        columns: the declared columns by name.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"rms": [-0.1], "rms_low": [-0.2], "rms_high": [0.1]})
        >>> above_noise(table, {"rms": Column("rms", noise="noise")}).iloc[0].tolist()
        [0.0, 0.0, 0.1]
    """
    shown = table.copy()
    for name in [name for name, about in columns.items() if about.noise and name in table]:
        low, high = bound_columns(name)
        within = (table[low] <= 0) & (table.get("of", "") != "lead")
        shown.loc[within, [name, low]] = 0.0
        shown.loc[within, high] = table[high].clip(lower=0.0)
    return shown


def is_number(text: str) -> bool:
    """Return whether a cell's text is a number, blank, or a word in place of a number.

    Example:
        >>> is_number("-3% [-4, -2]"), is_number("needed")
        (True, False)
    """
    return not text or text[0] in "<+-0123456789" or text in (NO_PATTERN, WITHIN, NO_SHARE)


def estimates_of(rows: pd.DataFrame, column: str) -> Float[np.ndarray, "3 row"]:
    """Return the estimates, the lower and the upper bounds of a table's rows."""
    return rows[[column, *bound_columns(column)]].to_numpy(float).T


def number_text(value: float) -> str:
    """Return a number of a table with three digits; rounding errors of float64 are 0.

    Example:
        >>> number_text(0.12345), number_text(-1.35e-17)
        ('0.123', '0')
    """
    return f"{value:.3g}" if abs(value) > ROUNDING else "0"
