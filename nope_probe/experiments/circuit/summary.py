"""The headline of a circuit run, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from nope_probe.experiments.circuit.findings import (
    Rows,
    have_opposite_signs,
    localities,
    most_changed,
    preferences,
)
from nope_probe.experiments.console import PlainConsole
from nope_probe.experiments.summary import narrow_table, print_headline
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.figures.words import MEASURES, phrase
from nope_probe.runtime.folder import Run

SHOWN = ("amplitude", "locality", "relative_r2")


def headline(manifest: Mapping[str, Any], table: pd.DataFrame) -> list[str]:
    """Return which keys each stage prefers, and whether (g) inverts the pattern.

    Args:
        manifest: the run's `layer`, `model`, `removed` components and `absent` stages.
        table: `stages.csv`.
    """
    layer, name, removed = manifest["layer"], manifest["model"]["name"], manifest["removed"]
    without = f" without {' and '.join(map(phrase, removed))}" if removed else ""
    intact, ablated = localities(table, "intact"), localities(table, "ablated")
    shown = ablated if removed else intact
    sentences = [
        f"In L{layer} of {name}{without}, {preferences(shown)}.",
        _inversion(shown, "mlp" in removed),
    ]
    if ablated:
        sentences.append(_against_intact(ablated, intact))
    if "h" in manifest["absent"]:
        sentences.append(
            f"L{layer} is the last, so there is no next layer: (h) and (i) do not exist."
        )
    return sentences


def _inversion(rows: Rows, no_ffn: bool) -> str:
    """Return how the pattern changes from (f) over (g) to (h), which the paper cannot explain."""
    values = ", ".join(f"{rows[stage][0]:+.2f} at ({stage})" for stage in "fgh" if stage in rows)
    if "f" not in rows or "g" not in rows:
        return "This block has no (f) to compare (g) with: an inversion by its FFN is undefined."
    if any(isnan(rows[stage][0]) for stage in "fgh" if stage in rows):
        return (
            "Some of (f), (g) and (h) have no order of keys to compare: an inversion is undefined."
        )
    lead = f"The rank correlation of a value with its key's position is {values}: "
    lead += "the positional pattern is "
    if not have_opposite_signs(rows["f"], rows["g"]):
        return lead + "not significantly inverted at (g)."
    inverted = f"inverted at (g), after {'the residual sum' if no_ffn else 'the FFN'}"
    if "h" not in rows:
        return f"{lead}{inverted}."
    restored = "" if have_opposite_signs(rows["g"], rows["h"]) else "not significantly "
    return f"{lead}{inverted}, and {restored}restored at (h), after the next norm."


def _against_intact(rows: Rows, intact: Rows) -> str:
    most = most_changed(rows, intact)
    if not most:
        return "No stage has an order of keys to compare with the intact model's."
    parts = [f"from {intact[s][0]:+.2f} to {rows[s][0]:+.2f} at ({s})" for s in most]
    return f"Compared with the intact model it changes most {' and '.join(parts)}."


def print_summary(run: Run, folder: Path) -> None:
    """Print the measures of each stage, the headline of a run and the path of its report."""
    manifest = run.manifest
    console = PlainConsole()
    console.print(_stages_table(manifest, run.tables["stages"]))
    console.print()
    print_headline(manifest, folder)


def _stages_table(manifest: Mapping[str, Any], stages: pd.DataFrame) -> Table:
    """Return a row per stage: the measures of its map, of the intact model and the ablated one."""
    title = f"{manifest['model']['name']}, L{manifest['layer']}: each stage's map, as a pattern"
    table = narrow_table(title)
    has_both = stages["model"].nunique() > 1
    table.add_column("stage")
    for name in SHOWN:
        table.add_column(MEASURES[name].label, justify="right")
    for row in stages.sort_values("stage", kind="stable").to_dict("records"):
        which = f" {row['model']}" if has_both else ""
        table.add_row(f"({row['stage']}){which}", *(_measure(row, name) for name in SHOWN))
    return table


def _measure(row: Mapping[Any, Any], name: str) -> str:
    """Return a measure with its interval; amplitudes of stages differ by orders of magnitude."""
    style = "#.2g" if name == "amplitude" else "z.2f"
    return interval_text(interval_of(row, name), style)
