"""What the commands' headlines and closing lines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nope_probe.experiments.console import print_lines
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.reports.notes import run_notes

WIDTH, GAP = 80, 2  # of a terminal, and between two columns of a table


def narrow_table(title: str) -> Table:
    """Return an empty table with little space between its columns: intervals are long."""
    return Table(
        title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False
    )


def columns_that_fit(widths: Sequence[int], room: int = WIDTH, gap: int = GAP) -> list[list[int]]:
    """Return the places of a table's columns, in groups that are narrow enough for a terminal.

    Args:
        widths: of the columns; the first names the rows, and stands in every group.
        room: characters in a line.
        gap: characters between two columns.

    Example:
        >>> columns_that_fit([5, 9, 9, 20], room=30, gap=1)
        [[0, 1, 2], [0, 3]]
    """
    groups: list[list[int]] = []
    for place in range(1, len(widths)):
        here = [*groups[-1], place] if groups else [0, place]
        if not groups or sum(widths[each] + gap for each in here) - gap > room:
            groups.append([0, place])
        else:
            groups[-1].append(place)
    return groups


def strongest(rows: pd.DataFrame) -> pd.Series | None:
    """Return the row with the largest amplitude that exceeds its noise, if there is one.

    Args:
        rows: `pattern.csv` of one model, one row per layer.
    """
    above = rows[rows["amplitude_low"] > 0]
    return None if above.empty else above.sort_values("amplitude").iloc[-1]


def no_pattern(name: str) -> str:
    """Return the headline of a model without a positional pattern."""
    return f"{name} shows no positional pattern in its attention that exceeds the noise."


def preference(row: Mapping[Any, Any] | pd.Series) -> str:
    """Return which keys a pattern prefers, with the number that shows it, where there is one."""
    if isnan(row["locality"]):
        return "has too few keys per query to rank them"
    keys = "near" if row["locality"] > 0 else "far"
    return f"prefers {keys} keys (rank correlation with the key's position {row['locality']:+.2f})"


def nats(row: Mapping[Any, Any] | pd.Series, column: str) -> str:
    """Return an estimate of a table's row with its interval, to a thousandth."""
    return interval_text(interval_of(row, column))


def print_closing(
    console: Console, manifest: Mapping[str, Any], headline: Sequence[str], folder: Path
) -> None:
    """Print a run's headline, the meaning of its intervals, and the path of its report."""
    for sentence in headline:
        console.print(sentence, end="\n\n")
    skip, documents = manifest["skip_keys"], manifest.get("documents")
    of_documents = "" if documents is None else f" of {documents} documents"
    console.print(
        f"Brackets are 95% intervals from {manifest['settings']['folds']} folds{of_documents}; "
        f"{skip} first key{'' if skip == 1 else 's'} skipped; noise biases locality towards 0.",
        style="dim",
    )
    for note in run_notes(manifest):
        console.print(note)
    console.print(f"open {folder / 'report.html'}", soft_wrap=True)


def print_headline(manifest: Mapping[str, Any], folder: Path) -> None:
    """Print the headline that a run's manifest holds, and the path of its report."""
    print_lines([*manifest["headline"], f"report: {folder / 'report.html'}"])
