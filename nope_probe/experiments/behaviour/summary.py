"""The headline of a behaviour run, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nope_probe.experiments.behaviour.measures import QUANTITIES
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.figures.words import phrase
from nope_probe.runtime.folder import Run

Tables = Mapping[str, pd.DataFrame]
INTACT = "intact"


def headline(manifest: Mapping[str, Any], tables: Tables) -> list[str]:
    """Return what each removal costs, whether text is copied, and if position is decodable."""
    name, behaviour = manifest["model"]["name"], tables["behaviour"]
    sentences = [
        _loss_sentence(name, behaviour),
        _copy_sentence(name, behaviour),
        _position_sentence(name, tables["decodability"]),
    ]
    found = [sentence for sentence in sentences if sentence]
    return found or [f"The behaviour of {name}, condition by condition."]


def _loss_sentence(name: str, behaviour: pd.DataFrame) -> str:
    rows = behaviour[behaviour["measure"] == "loss_suffix"].dropna(subset=["difference"])
    if rows.empty:
        return ""
    rows = rows.sort_values("difference", ascending=False)
    parts = [
        f"{_signed(row, '.2f')} without {phrase(str(row['condition']))}"
        for _, row in rows.iterrows()
    ]
    changes = "; ".join(parts)
    return f"The loss of {name} on the second part of a window changes by, in nats: {changes}."


def _copy_sentence(name: str, behaviour: pd.DataFrame) -> str:
    rows = behaviour[(behaviour["measure"] == "copy_text") & (behaviour["condition"] == INTACT)]
    if rows.empty:
        return ""
    row = rows.iloc[0]
    if np.isnan(row["value"]):
        return f"{name} does not copy text: its second copy costs no less than the first."
    value = interval_text(interval_of(row, "value"), "z.2f", " nats")
    return f"A segment of text that {name} reads again costs {value} less the first time's loss."


def _position_sentence(name: str, table: pd.DataFrame) -> str:
    rows = table[table["condition"] == INTACT]
    if rows.empty:
        return ""
    best = rows.sort_values("distance").iloc[0]
    text = (
        f"Position can be read from the residual stream of {name} to within "
        f"{interval_text(interval_of(best, 'distance'), '.1f')} positions (L{best['layer']:.0f}; "
        f"chance is {best['chance']:.1f})"
    )
    without = table[(table["condition"] == "mask") & (table["layer"] == best["layer"])]
    if not without.empty:
        gone = interval_text(interval_of(without.iloc[0], "distance"), ".1f")
        text += f", without the mask to within {gone}"
    return f"{text}."


def print_summary(run: Run, folder: Path) -> None:
    """Print the table and sentences of a run to the terminal."""
    manifest, tables = run.manifest, run.tables
    console = Console(highlight=False)
    console.print(_table(manifest, tables["behaviour"]))
    for measure, reason in manifest["skipped"].items():
        console.print(f"{measure} was not measured: {reason}", style="dim")
    for sentence in headline(manifest, tables):
        console.print(sentence, end="\n\n")
    console.print(
        f"Brackets are 95% intervals over {manifest['n_documents']} documents. Without the mask "
        f"the first {manifest['prefix']} tokens see each other, and those after them are scored.",
        style="dim",
    )
    console.print(f"{manifest['seconds']:.0f} s; open {folder / 'report.html'}")


def _table(manifest: Mapping[str, Any], behaviour: pd.DataFrame) -> Table:
    """Return a section per measure: the intact model's value, then each condition's difference."""
    title = f"{manifest['model']['name']}: behaviour, nats per token"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("measure")
    table.add_column("without")
    table.add_column("value", justify="right")
    table.add_column("difference to intact", justify="right")
    for measure, rows in behaviour.groupby("measure", sort=False):
        for index, row in enumerate(rows.to_dict("records")):
            name = QUANTITIES[str(measure)].label if index == 0 else ""
            removed = "(intact)" if row["condition"] == INTACT else row["condition"]
            table.add_row(name, removed, *_cells(row))
        table.add_section()
    return table


def _cells(row: Mapping[Any, Any]) -> tuple[str, str]:
    value = "" if np.isnan(row["value"]) else interval_text(interval_of(row, "value"))
    if np.isnan(row["difference"]):
        return value, "" if value else str(row["note"])
    return value, _signed(row, ".3f")


def _signed(row: Mapping[Any, Any] | pd.Series, style: str) -> str:
    value, low, high = interval_of(row, "difference")
    return f"{value:+z{style}} [{low:z{style}}, {high:z{style}}]"
