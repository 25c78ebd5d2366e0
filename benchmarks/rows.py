"""Measured claims: one row each, with its spread, as a markdown table or as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim with what was measured.

    Attributes:
        work: what was run.
        against: what it is compared with, or "" where the value stands alone.
        value: the median, in `unit`.
        low: the smallest of the rounds; None if there was one round.
        high: the largest of the rounds.
        unit: of the value: "times its time", "times less time", "MB", "s".
        goal: what the project aims at, in the same unit; "" if nothing.
    """

    work: str
    against: str = ""
    value: float
    low: float | None = None
    high: float | None = None
    unit: str
    goal: str = ""

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the row's cells as text."""
        spread = "" if self.low is None else f"{number(self.low)} to {number(self.high)}"
        return self.work, self.against, f"{number(self.value)} {self.unit}", spread, self.goal


def row(work: str, values: Sequence[float], unit: str, *, against: str = "", goal: str = "") -> Row:
    """Return the row of a claim from what each round measured: the median and the range."""
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    middle = statistics.median(values)
    return Row(work=work, against=against, value=middle, low=low, high=high, unit=unit, goal=goal)


def number(value: float | None) -> str:
    """Return a number with three significant digits, without an exponent."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def markdown(rows: Sequence[Row]) -> str:
    """Return rows as a markdown table."""
    header = ("work", "against", "measured", "range", "goal")
    lines = [header, tuple("---" for _ in header), *(each.cells() for each in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print rows for a reader, or on one line for `bench.py`."""
    print(json.dumps([asdict(each) for each in rows]) if as_json else markdown(rows), flush=True)


def parse(line: str) -> list[Row]:
    """Return the rows that `show` printed as JSON."""
    return [Row(**each) for each in json.loads(line)]
