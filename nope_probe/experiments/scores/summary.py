"""What a run of the scores command says, in a sentence and a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nope_probe.experiments.ablation.summary import fine_print
from nope_probe.runtime.folder import Run

COLUMNS = {
    "amplitude": "amplitude, nats",
    "locality": "locality",
    "relative_r2": "relative share",
    "edge_contrast": "edge contrast, nats",
    "edge_contrast_visible": "visible contrast, nats",
}


def headline(manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Say where the pattern is strongest, which keys it prefers and, per head, which head leads."""
    name, rows = manifest["model"]["name"], tables["pattern"]
    seen = rows[rows["amplitude_low"] > 0]
    if seen.empty:
        return [f"{name} shows no positional pattern in its attention that rises above the noise."]
    best = seen.sort_values("amplitude").iloc[-1]
    drift = "near" if best["locality"] > 0 else "far"
    sentences = [
        f"The positional pattern in the attention scores of {name} is strongest in "
        f"L{best['layer']:.0f}, {_interval(best, 'amplitude')} nats RMS, and prefers {drift} keys "
        f"there (rank correlation with the key's position {best['locality']:+.2f})."
    ]
    if "heads" in tables:
        head = tables["heads"].sort_values("amplitude").iloc[-1]
        sentences.append(
            f"Of all heads, L{head['layer']:.0f}H{head['head']:.0f} has the strongest "
            f"pattern, {_interval(head, 'amplitude')} nats (locality {head['locality']:+.2f})."
        )
    return sentences


def print_summary(run: Run, folder: Path) -> None:
    """Print the tables and sentences of a run to the terminal."""
    manifest, tables = run.manifest, run.tables
    console = Console(highlight=False)
    name = manifest["model"]["name"]
    table = Table(title=f"{name}: the pattern in the mean scores", box=SIMPLE_HEAD)
    for column in ("layer", *COLUMNS.values()):
        table.add_column(column, justify="right")
    for row in tables["pattern"].to_dict("records"):
        table.add_row(f"L{row['layer']}", *(_interval(row, column) for column in COLUMNS))
    console.print(table)
    for sentence in headline(manifest, tables):
        console.print(sentence, end="\n\n")
    console.print(fine_print(manifest), style="dim")
    console.print(f"{manifest['seconds']:.0f} s; open {folder / 'report.html'}")


def _interval(row: Mapping[Any, Any] | pd.Series, name: str) -> str:
    if pd.isna(row[name]):
        return "no pattern"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:z.3f} [{low:z.3f}, {high:z.3f}]"
