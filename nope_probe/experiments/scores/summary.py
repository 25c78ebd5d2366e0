"""The headline of a scores run, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from nope_probe.experiments.console import PlainConsole
from nope_probe.experiments.summary import (
    narrow_table,
    nats,
    no_pattern,
    preference,
    print_closing,
    strongest,
)
from nope_probe.figures.intervals import interval_of, interval_text
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
        locality = "" if isnan(head["locality"]) else f" (locality {head['locality']:+.2f})"
        sentences.append(
            f"Of all heads, L{head['layer']:.0f}H{head['head']:.0f} has the strongest positional "
            f"pattern, {nats(head, 'amplitude')} nats{locality}."
        )
    return sentences


def print_summary(run: Run, folder: Path) -> None:
    """Print the table and sentences of a run to the terminal."""
    manifest, tables = run.manifest, run.tables
    console = PlainConsole()
    title = f"{manifest['model']['name']}: the positional pattern in the mean scores"
    for names, more in ((SHOWN[:3], ""), (SHOWN[3:], ", continued")):
        console.print(_table(f"{title}{more}", tables["pattern"], names))
        console.print()
    print_closing(console, manifest, headline(manifest, tables), folder)


def _table(title: str, pattern: pd.DataFrame, names: Sequence[str]) -> Table:
    """Return a row per layer, with some of its measures; two such tables fit into 80 columns."""
    table = narrow_table(title)
    table.add_column("layer", no_wrap=True)
    for name in names:
        table.add_column(MEASURES[name].title, justify="right", no_wrap=True)
    for row in pattern.to_dict("records"):
        cells = (interval_text(interval_of(row, name), _style(name)) for name in names)
        table.add_row(f"L{row['layer']}", *cells)
    return table


def _style(name: str) -> str:
    return "z.3f" if MEASURES[name].unit == "nats" else "z.2f"
