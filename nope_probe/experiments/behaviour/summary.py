"""The headline of a behaviour run, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from nope_probe.components import phrase
from nope_probe.experiments.behaviour.measures import QUANTITIES
from nope_probe.experiments.console import PlainConsole
from nope_probe.experiments.summary import columns_that_fit, narrow_table
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.runtime.folder import Run

Tables = Mapping[str, pd.DataFrame]
INTACT = "intact"
HEAD = 13  # characters in a line of a column's head


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
        f"{_signed(row, '.2f')} without {_phrase(str(row['condition']))}"
        for _, row in rows.iterrows()
    ]
    changes = "; ".join(parts)
    return f"The loss of {name} on the second part of a window changes by, in nats: {changes}."


def _phrase(condition: str) -> str:
    components, _, replacement = condition.partition(":")
    return f"{phrase(components)} ({replacement})" if replacement else phrase(components)


def _copy_sentence(name: str, behaviour: pd.DataFrame) -> str:
    rows = behaviour[(behaviour["measure"] == "copy_text") & (behaviour["condition"] == INTACT)]
    if rows.empty:
        return ""
    row = rows.iloc[0]
    if np.isnan(row["value"]):
        return f"{name} does not copy text: its second copy costs no less than the first."
    value, low, high = interval_of(row, "value")
    less = interval_text((-value, -high, -low), "z.2f", " nats")
    return f"A segment of text costs {name} {less} less per token when it comes a second time."


def _position_sentence(name: str, table: pd.DataFrame) -> str:
    rows = table[table["condition"] == INTACT]
    if rows.empty:
        return ""
    best = rows.sort_values("distance").iloc[0]
    if not best["distance_high"] < best["chance"]:
        return (
            f"Position cannot be read from the residual stream of {name} beyond chance "
            f"({best['chance']:.1f} positions)."
        )
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
    console = PlainConsole()
    for table in _tables(manifest["model"]["name"], tables["behaviour"]):
        console.print(table)
        console.print()
    for line in _notes(tables["behaviour"]):
        console.print(line, style="dim")
    console.print()
    for sentence in headline(manifest, tables):
        console.print(sentence, end="\n\n")
    console.print(
        f"Brackets, ± : 95% intervals over {manifest['documents']} documents. Without the mask "
        f"the first {manifest['prefix']} tokens see each other, and those after them are scored.",
        style="dim",
    )
    console.print(f"open {folder / 'report.html'}", soft_wrap=True)


def _tables(name: str, behaviour: pd.DataFrame) -> Iterator[Table]:
    """Yield tables with a row per condition: the intact model's values, the others' differences.

    Each has as many of the measures as fit into a line.
    """
    known = [each for each in QUANTITIES if each in set(behaviour["measure"])]
    columns = [_names(behaviour), *(_cells(behaviour, each) for each in known)]
    heads = ["without", *(_head(QUANTITIES[each].label) for each in known)]
    widths = [
        max(map(len, [*head.split("\n"), *cells]))
        for head, cells in zip(heads, columns, strict=True)
    ]
    for group in columns_that_fit(widths):
        more = ", continued" if group[1] > 1 else ""
        table = narrow_table(f"{name}: behaviour, less the intact model's{more}")
        for place in group:
            table.add_column(heads[place], justify="right" if place else "left", no_wrap=True)
        for row in zip(*(columns[place] for place in group), strict=True):
            table.add_row(*row)
        yield table


def _head(label: str) -> str:
    lines = wrap(label, HEAD, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _names(behaviour: pd.DataFrame) -> list[str]:
    conditions = dict.fromkeys(behaviour["condition"])
    return ["(intact)" if each == INTACT else str(each) for each in conditions]


def _cells(behaviour: pd.DataFrame, measure: str) -> list[str]:
    rows = behaviour[behaviour["measure"] == measure].set_index("condition")
    return [_cell(rows.loc[each], each == INTACT) for each in dict.fromkeys(behaviour["condition"])]


def _cell(row: Mapping[Any, Any] | pd.Series, is_intact: bool) -> str:
    value, _, high = interval_of(row, "value" if is_intact else "difference")
    if np.isnan(value):
        return "-"
    return f"{value:{'' if is_intact else '+'}z.2f} ±{high - value:.2f}"


def _signed(row: Mapping[Any, Any] | pd.Series, style: str) -> str:
    value, low, high = interval_of(row, "difference")
    return f"{value:+z{style}} [{low:z{style}}, {high:z{style}}]"


def _notes(behaviour: pd.DataFrame) -> Iterator[str]:
    """Yield which numbers are not shown and why, once per measure and reason."""
    rows = behaviour.dropna(subset=["note"])
    for (note, measure), ours in rows[rows["note"] != ""].groupby(["note", "measure"], sort=False):
        conditions = ", ".join(ours["condition"])
        yield f"{QUANTITIES[str(measure)].label} ({conditions}): {note}"
