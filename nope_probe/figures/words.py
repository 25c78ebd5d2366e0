"""Columns and views of tables, as studies declare them; names of measures, layers and heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from math import isnan
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

BOTH_WAYS, SHARE = "-1 to 1", "share"
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
PLACES: Columns = {  # columns that name rows, in the tables of all studies
    "layer": Column("layer", "The layer, from 0."),
    "head": Column("head", "The query head, from 0."),
    "removed": Column(
        "removed",
        "What is removed, joined by `+`; `intact` where nothing is, `shuffled` on permuted tokens.",
    ),
    "replacement": Column(
        "replacement", "What removed weights are replaced by; `none` without removed weights."
    ),
    "of": Column("of", "`lead`: of the first key's lead; `pattern`: of the other keys' pattern."),
    "term": Column("term", "The part of an exact sum."),
    "position": Column("position", "The position in the sequence, from 0.", "positions"),
}


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


QUESTIONS = {"lead": "first key's lead", "order": "order of other keys"}
NUMBERS = {**QUESTIONS, "not_by_distance": "not by distance"}  # a layer's three numbers
MEASURES = {
    "lead": Column(
        QUESTIONS["lead"],
        "The score of the first key less the mean of the other earlier keys.",
        "nats",
        signed=True,
    ),
    "amplitude": Column(
        "amplitude",
        "The strength of the pattern among the other keys: its RMS, corrected for noise.",
        "nats",
        noise=WITHIN,
    ),
    "locality": Column(
        "locality",
        "Rank correlation with the key's position: above 0, near keys are preferred.",
        BOTH_WAYS,
        neutral=0.0,
        signed=True,
    ),
    "monotonicity": Column(
        "monotonicity",
        "Share of pairs of keys at a distance of 8 whose nearer key scores higher; 1/2: no trend.",
        "lag 8",
        neutral=0.5,
    ),
    "relative_r2": Column(
        "relative share",
        "Share of the positional pattern that depends on distance alone; blank without one.",
        SHARE,
        blank=NO_PATTERN,
    ),
    "not_by_distance": Column(
        "not by distance",
        "RMS of the part of the positional pattern that does not depend on distance alone.",
        "nats",
        noise=WITHIN,
    ),
}
HEAD_MEASURES = ("lead", "amplitude", "locality", "relative_r2")  # of a head's pattern
ATTENTION = {  # measures of a head's attention
    "first_key": Column(
        "first-key attention",
        "Mean attention to the first key; above 0.3 the head is called a sink.",
        SHARE,
    ),
    "previous_token": Column(
        "previous-token attention", "Mean attention to the token before the query.", SHARE
    ),
    "induction": Column(
        "induction attention",
        "On repeated random tokens, mean attention to the token after the query's last copy.",
        SHARE,
    ),
}
INFORMATION = {  # of a head's attention weights
    "information": Column("information", "How far attention is from uniform.", "nats"),
    "first_position": Column(
        "first key, position", "Whether to look at the first key, the same in every text.", "nats"
    ),
    "first_content": Column(
        "first key, content", "Whether to look at it, differing from text to text.", "nats"
    ),
    "others_position": Column(
        "other keys, position", "Where to look among them, the same in every text.", "nats"
    ),
    "others_content": Column(
        "other keys, content", "Where to look among them, differing from text to text.", "nats"
    ),
    "positional_share": Column(
        "position",
        "The share of position in the information about all keys.",
        SHARE,
        blank=NO_SHARE,
    ),
    "others_share": Column(
        "position among the others",
        "The share of position among the other keys.",
        SHARE,
        blank=NO_SHARE,
    ),
    "first_weight": Column("first key", "The weight of the first key.", SHARE),
    "pattern_missed": Column(
        "missed by the mean scores",
        "The share of `others_position` that the softmax of the mean scores misses.",
        SHARE,
        blank=NO_SHARE,
    ),
    "positional_share_gap": Column("gap", "Its upper less its lower bound.", SHARE),
    "others_share_gap": Column("gap", "Its upper less its lower bound.", SHARE),
    "sink_weight": Column("learned sink", "What a learned sink takes of all attention.", SHARE),
}


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
