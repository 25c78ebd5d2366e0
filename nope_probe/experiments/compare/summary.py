"""The sentences of a comparison, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nope_probe.experiments.compare.members import Member, share_sequences
from nope_probe.figures.words import MEASURES
from nope_probe.runtime.folder import read_run

if TYPE_CHECKING:
    from nope_probe.experiments.compare.maps import Compared

SHOWN = 12  # rows on the terminal


def headline(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> list[str]:
    """Return where the runs differ most, and how differences were taken, a sentence each."""
    sentences = [_largest(each.label, members[0].label, maps) for each in members[1:] if maps]
    differ = (table["difference_low"] > 0) | (table["difference_high"] < 0)
    sentences.append(f"{differ.sum()} of {len(table)} numbers differ beyond their 95% interval.")
    sentences.append(_method(members, maps, table))
    return sentences


def _largest(label: str, base: str, maps: Sequence[Compared]) -> str:
    best = max(maps, key=lambda each: each.differences[label].rms.value)
    found = best.differences[label]
    if not any(each.differences[label].is_significant is not False for each in maps):
        return f"The positional patterns of {label} and {base} do not differ beyond noise."
    return (
        f"The positional pattern of {label} differs most from that of {base} in {best.name}: the "
        f"RMS of the difference is {found}."
    )


def _method(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> str:
    if not share_sequences(members):
        return "The runs had different sequences, so differences are unpaired."
    paired = any(each.paired for found in maps for each in found.differences.values())
    if paired or (table["method"] == "paired").any():
        return (
            "The runs had the same sequences: differences of positional patterns and of their "
            "measures are paired over folds, others are unpaired."
        )
    return "The runs had the same sequences but kept no fold maps, so differences are unpaired."


def print_summary(folder: Path) -> None:
    """Print the largest differences of a comparison, its sentences, and the path of its page."""
    found = read_run(folder)
    table = found.tables["differences"]
    console = Console(highlight=False)
    if len(table):
        console.print(_table(table, found.manifest["labels"][0]))
    for sentence in found.manifest["headline"]:
        console.print(sentence, end="\n\n")
    console.print(f"open {folder / 'report.html'}")


def _table(table: pd.DataFrame, base: str) -> Table:
    """Return the clearest differences, which are the largest for their intervals."""
    shown = Table(title=f"The clearest differences to {base}", box=SIMPLE_HEAD)
    for name in ("what", "run", "value", f"of {base}", "difference"):
        shown.add_column(name, justify="left" if name in ("what", "run") else "right")
    for cells in _rows(table):
        shown.add_row(*cells)
    return shown


def _rows(table: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    arm = (table["difference_high"] - table["difference_low"]) / 2
    clearest = (table["difference"].abs() / arm.where(arm > 0)).sort_values(ascending=False)
    for index in clearest.index[:SHOWN]:
        row = table.loc[index]
        label = MEASURES[row["measure"]].title if row["measure"] in MEASURES else row["measure"]
        bounds = f"[{row['difference_low']:+.3g}, {row['difference_high']:+.3g}]"
        yield (
            f"{row['item']}, {label}",
            str(row["run"]),
            f"{row['value']:.3g}",
            f"{row['base_value']:.3g}",
            f"{row['difference']:+.3g} {bounds}",
        )
