"""Columns and views of tables, as studies declare them; names of measures, layers and heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from math import isnan
from typing import TYPE_CHECKING, Any, Literal

from nope_probe.files import packaged

if TYPE_CHECKING:
    import pandas as pd

BOTH_WAYS, SHARE = "-1 to 1", "share"  # units whose axes are bounded
NO_PATTERN, WITHIN, NO_SHARE = "no pattern", "within noise", "no share"  # instead of numbers
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
