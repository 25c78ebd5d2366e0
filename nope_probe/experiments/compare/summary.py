"""The sentences of a comparison, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.table import Table

from nope_probe.experiments.compare.members import UNITS, Member, share_sequences
from nope_probe.experiments.compare.tables import clearest
from nope_probe.experiments.console import PlainConsole
from nope_probe.experiments.summary import narrow_table
from nope_probe.runtime.folder import read_run

if TYPE_CHECKING:
    from nope_probe.experiments.compare.maps import Compared

WHAT = 30  # characters in a line of the first column


def headline(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> list[str]:
    """Return where the runs differ most, and how differences were taken, a sentence each."""
    sentences = [
        _largest(each.label, members[0].label, maps, members[0].kind)
        for each in members[1:]
        if maps
    ]
    differ = (table["difference_low"] > 0) | (table["difference_high"] < 0)
    sentences.append(f"{differ.sum()} of {len(table)} numbers differ beyond their 95% interval.")
    if any(len(each.maps) > len(maps) for each in members):
        sentences.append(f"Compared are the {len(maps)} maps that all runs have.")
    sentences.append(_method(members, maps, table))
    return sentences


def _largest(label: str, base: str, maps: Sequence[Compared], kind: str) -> str:
    best = max(maps, key=lambda each: each.differences[label].rms.value)
    found = best.differences[label]
    if not any(each.differences[label].is_significant is not False for each in maps):
        return f"The positional patterns of {label} and {base} do not differ beyond noise."
    return (
        f"The positional pattern of {label} differs most from that of {base} in {best.name}: the "
        f"RMS of the difference is {found} {UNITS.get(kind, 'nats')}."
    )


def _method(members: Sequence[Member], maps: Sequence[Compared], table: pd.DataFrame) -> str:
    if members[0].kind == "simulate":
        return "Differences of simulations are unpaired."
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
    console = PlainConsole()
    base = found.manifest["labels"][0]
    for label, rows in table.groupby("run", sort=False):
        console.print(_table(str(label), base, rows))
        console.print()
    for sentence in found.manifest["headline"]:
        console.print(sentence, end="\n\n")
    console.print(f"open {folder / 'report.html'}", soft_wrap=True)


def _table(label: str, base: str, rows: pd.DataFrame) -> Table:
    """Return a run's clearest differences, which are the largest for their intervals."""
    shown = narrow_table(f"{label} less {base}: the clearest differences")
    shown.add_column("what", max_width=WHAT)
    for name in ("value", "base", "difference"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("")
    for what, _, value, of_base, difference, method in clearest(rows):
        shown.add_row(what, value, of_base, difference, method)
    return shown
