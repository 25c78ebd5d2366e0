"""Columns and views of tables, as studies declare them, and their numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from math import isnan
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from nope_probe.files import packaged

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from jaxtyping import Float

BOTH_WAYS, SHARE = "-1 to 1", "share"  # units whose axes are bounded
NO_PATTERN, WITHIN, NO_SHARE = "no pattern", "within noise", "no share"  # instead of numbers
ROUNDING = 1e-12  # smaller numbers are rounding errors of float64
HALF_WIDTH = "±z.2f"  # the style of an estimate with half the width of its interval
HEADING = 13  # characters in a line of the headings of first tables
CLIPPED = 0.5  # percent of a map's cells beyond each limit of its colours


@dataclass(frozen=True)
class Column:
    """A number of a table: its name, its meaning, and how tables and figures show it.

    Attributes:
        label: its name in figures, or empty for the name of the column.
        meaning: one sentence.
        unit: nats, positions, a range or a lag; `share` for a part of 1, shown in percent; empty
            for a count or a name.
        blank: what is shown where there is no number.
        noise: what is shown where the interval does not exceed 0, of an RMS corrected for noise,
            whose square can be below 0; empty for all other numbers.
        neutral: the value that means no trend; None for numbers without one.
        signed: whether it has a sign, so that colours centre on 0.
        names_rows: whether its values say what a row is of, as a layer does.
    """

    label: str
    meaning: str = ""
    unit: str = ""
    _: KW_ONLY
    blank: str = ""
    noise: str = ""
    neutral: float | None = None
    signed: bool = False
    names_rows: bool = False

    @property
    def is_share(self) -> bool:
        """Whether tables and axes show it in percent."""
        return self.unit == SHARE

    @property
    def shown_unit(self) -> str:
        """The unit, but of shares, whose percents say what they are."""
        return "" if self.is_share else self.unit

    @property
    def title(self) -> str:
        """Label and unit, as on an axis."""
        return ", ".join(filter(None, (self.label, self.shown_unit)))

    @property
    def note(self) -> str:
        """Label and meaning, as in a list of how to read a page."""
        return f"{capitalised(self.label)}: {self.meaning}"


Columns = Mapping[str, Column]
ValueAndBounds = tuple[float, float, float]


def columns(of: str) -> Columns:
    """Return the columns of a table of `columns.toml` by name."""
    declared = packaged("figures/columns.toml")[of]
    return {name: Column(**column) for name, column in declared.items()}


PLACES = columns("places")  # columns that name rows, in the tables of all studies
MEASURES = columns("measures")  # of a layer's or head's pattern
HEAD_MEASURES = ("lead", "amplitude", "locality", "relative_r2")
ATTENTION = columns("attention_weights")  # measures of a head's attention
INFORMATION = columns("information")  # of a head's attention weights
QUESTIONS = {"lead": MEASURES["lead"].label, "order": columns("ablate")["order"].label}
NUMBERS = {**QUESTIONS, "not_by_distance": MEASURES["not_by_distance"].label}  # of a layer


@dataclass(frozen=True, kw_only=True)
class View:
    """A table on the page, and how it is drawn.

    Attributes:
        table: the name of its file.
        title: of its section, at most 8 words.
        caption: how to read it, and how it misleads, at most 40 words.
        y: the columns that are drawn, with their bounds, a panel each; a tuple of columns shares a
            panel, where all but the first have open markers or other dashes. Without y, the
            section shows the table alone.
        x: the column along the axis; of rows, the column down the axis.
        by: the columns whose values are series. The first gives colour and marker, the last of
            several dashes or open markers. Of cells, the column of the rows.
        panels: the column whose values are panels.
        kind: `dots` have error bars and stand side by side; `rows` are dots on their sides, a row
            for each value of x; `lines` join the dots, which are hollow where the interval has 0;
            `curves` have bands; `cells` are a heat map.
        names: what values of `by`, `panels` and `x` are called, where `words` does not say.
        rows: which rows are drawn, as `pandas.DataFrame.query` takes it. The table has all.
        later: which of these rows a button adds, in the same way.
        button: its label.
        marked: of cells, a column that says which ones get a dot.
        folded: whether only the heading shows until it is opened.
        across: panels in a row, at most.
        same_scale: whether panels of one unit share a scale.
        scale: of x.
    """

    table: str
    title: str
    caption: str = ""
    y: tuple[str | tuple[str, ...], ...] = ()
    x: str = "layer"
    by: tuple[str, ...] = ("removed",)
    panels: str = ""
    kind: Literal["dots", "rows", "lines", "curves", "cells"] = "dots"
    names: Mapping[str, str] = field(default_factory=dict)
    rows: str = ""
    later: str = ""
    button: str = ""
    marked: str = ""
    folded: bool = False
    across: int = 3
    same_scale: bool = False
    scale: Literal["linear", "log"] = "linear"


def layer_names(numbers: Iterable[int]) -> str:
    """Return layers by number, with runs of three layers or more as `L1 to L3`.

    Example:
        >>> layer_names([1, 2, 3, 7])
        'L1 to L3, L7'
    """
    places = enumerate(sorted({int(number) for number in numbers}))
    runs = [
        [layer for _, layer in run] for _, run in groupby(places, lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(
        f"L{run[0]} to L{run[-1]}" if len(run) > 2 else ", ".join(f"L{layer}" for layer in run)
        for run in runs
    )


def reader_of(row: Mapping[Any, Any] | pd.Series) -> str:
    """Return the layer or head of a row.

    Example:
        >>> reader_of({"layer": 2}), reader_of({"layer": 2, "head": 1.0})
        ('L2', 'L2H1')
    """
    head = row.get("head", float("nan"))
    return f"L{row['layer']:.0f}" + ("" if isnan(head) else f"H{head:.0f}")


def with_readers(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the name of each row's reader as a column."""
    return table.assign(reader=[reader_of(row) for row in table.to_dict("records")])


def capitalised(text: str) -> str:
    """Return a text with its first letter large, and all others unchanged.

    Example:
        >>> capitalised("the causal mask"), capitalised("RoPE")
        ('The causal mask', 'RoPE')
    """
    return text[:1].upper() + text[1:]


def heading(text: str) -> str:
    r"""Return a heading of a first table in short lines.

    Example:
        >>> heading("second copy, text")
        'second copy,\ntext'
    """
    return "\n".join(wrap(text, HEADING))


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
