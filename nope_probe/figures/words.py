"""The names of measures, layers and heads, and the words of their figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import pandas as pd

BOTH_WAYS = "-1 to 1"
MOST_READERS = 32  # readers that a figure or table shows at most


@dataclass(frozen=True)
class MeasureWords:
    """The names of a measure of the pattern, and the settings of its figures.

    Attributes:
        label: its name.
        unit: its unit, range or lag; empty for a share.
        caption: a sentence about the measure.
        neutral: the value that means no trend.
        signed: whether it has a sign, so that colours centre on 0.
        bounded: whether its absolute value is at most 1.
    """

    label: str
    unit: str
    caption: str
    neutral: float = 0.0
    signed: bool = False
    bounded: bool = False

    @property
    def title(self) -> str:
        """Label and unit, as on an axis."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def is_share(self) -> bool:
        """Whether tables show it in percent."""
        return not self.unit

    @property
    def is_amplitude(self) -> bool:
        """Whether it is an RMS, which tables show where it exceeds its noise."""
        return self.unit == "nats" and not self.signed


MEASURES = {
    "lead": MeasureWords(
        "lead of the first key",
        "nats",
        "The score of the first key less the mean of the other earlier keys.",
        signed=True,
    ),
    "amplitude": MeasureWords(
        "amplitude",
        "nats",
        "The strength of the pattern among the other keys: its RMS, corrected for noise.",
    ),
    "locality": MeasureWords(
        "locality",
        BOTH_WAYS,
        "Rank correlation with the key's position: above 0, near keys are preferred.",
        signed=True,
        bounded=True,
    ),
    "monotonicity": MeasureWords(
        "monotonicity",
        "lag 8",
        "Share of pairs of keys at a distance of 8 whose nearer key scores higher; 1/2: no trend.",
        neutral=0.5,
        bounded=True,
    ),
    "relative_r2": MeasureWords(
        "relative share",
        "",
        "Share of the positional pattern that depends on distance alone; blank without one.",
        bounded=True,
    ),
    "non_relative": MeasureWords(
        "non-relative",
        "nats",
        "RMS of the part of the positional pattern that does not depend on distance alone.",
    ),
}
ATTENTION = {  # measures of a head's attention
    "first_key": MeasureWords(
        "first-key attention",
        "",
        "Mean attention to the first key; above 0.3 the head is called a sink.",
        bounded=True,
    ),
    "previous_token": MeasureWords(
        "previous-token attention",
        "",
        "Mean attention to the token before the query.",
        bounded=True,
    ),
    "induction": MeasureWords(
        "induction attention",
        "",
        "On repeated random tokens, mean attention to the token after the query's last copy.",
        bounded=True,
    ),
}


def layer_names(numbers: Iterable[int]) -> str:
    """Return layers by number, with runs of three layers or more as `L1 to L3`.

    Example:
        >>> layer_names([1, 2, 3, 7])
        'L1 to L3, L7'
    """
    runs: list[list[int]] = []
    for number in sorted({int(number) for number in numbers}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
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


def whole_sizes(terms: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `terms.csv` of whole leads and patterns, with their readers.

    A lead below 0, of other keys over the first, has its size without the sign.
    """
    whole = with_readers(terms[terms["term"] == "all"])
    is_below = whole["size"] < 0
    ends = {"size": "size", "size_low": "size_high", "size_high": "size_low"}
    return whole.assign(
        **{name: whole[name].where(~is_below, -whole[other]) for name, other in ends.items()}
    )


def shown_readers(terms: pd.DataFrame, first: str | None = None) -> list[str]:
    """Return the readers to show: all, or if they are many, the first and the strongest."""
    readers = list(dict.fromkeys(with_readers(terms)["reader"]))
    if len(readers) <= MOST_READERS:
        return readers
    sizes = whole_sizes(terms).groupby("reader")["size"].max()
    kept = {first, *sizes.sort_values(ascending=False).index[: MOST_READERS - 1]}
    return [name for name in readers if name in kept]


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
