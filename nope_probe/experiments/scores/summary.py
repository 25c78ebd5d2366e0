"""The headline of a scores run, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from nope_probe.experiments.console import PlainConsole
from nope_probe.experiments.summary import nats, no_pattern, preference, print_closing, strongest
from nope_probe.figures.words import MEASURES
from nope_probe.runtime.folder import Run

SHOWN = ("amplitude", "locality", "relative_r2", "edge_contrast", "edge_contrast_visible")


def headline(manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return where the pattern is strongest, which keys it prefers and, per head, the strongest."""
    name = manifest["model"]["name"]
    best = strongest(tables["pattern"])
    if best is None:
        return [no_pattern(name)]
    sentences = [
        f"The positional pattern in the attention scores of {name} is strongest in "
        f"L{best['layer']:.0f}, {nats(best, 'amplitude')} nats RMS, and {preference(best)}."
    ]
    if "heads" in tables:
        head = tables["heads"].sort_values("amplitude").iloc[-1]
        sentences.append(
            f"Of all heads, L{head['layer']:.0f}H{head['head']:.0f} has the strongest positional "
            f"pattern, {nats(head, 'amplitude')} nats (locality {head['locality']:+.2f})."
        )
    return sentences


def print_summary(run: Run, folder: Path) -> None:
    """Print the table and sentences of a run to the terminal."""
    manifest, tables = run.manifest, run.tables
    console = PlainConsole()
    title = f"{manifest['model']['name']}: the positional pattern in the mean scores"
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in ("layer", *(MEASURES[name].title for name in SHOWN)):
        table.add_column(column, justify="right")
    for row in tables["pattern"].to_dict("records"):
        table.add_row(f"L{row['layer']}", *(nats(row, name) for name in SHOWN))
    console.print(table)
    print_closing(console, manifest, headline(manifest, tables), folder)
