"""The `compare` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from nope_probe.figures.words import Column
from nope_probe.run.settings import SessionSettings

COLUMNS = {
    "table": Column("table", "The runs' table that the number stands in."),
    "item": Column("item", "Its row: the layer, head and what else names it."),
    "measure": Column("measure", "Its column."),
    "run": Column("run", "The label of the run."),
    "value": Column("value", "The run's number."),
    "low": Column("low", "The lower end of its interval."),
    "high": Column("high", "The upper end of its interval."),
    "base_value": Column("base value", "The first run's number."),
    "difference": Column("difference", "The run's number less the first run's.", signed=True),
    "method": Column("method", "`paired` fold by fold, or `unpaired`."),
    "quantity": Column("quantity", "The information of a head's attention, or a part of it."),
    "change": Column("change", "The run's less the first run's.", "nats", signed=True),
    "p_holm": Column("p, by Holm's rule", "The chance of so large a change, times the tests left."),
    "changed": Column("changed", "Whether the change survives Holm's rule."),
}


@dataclass(frozen=True, kw_only=True)
class Settings(SessionSettings):
    """Compare finished runs of one command with the first run.

    Puts their tables side by side, on one page and in differences.csv: differences with intervals,
    paired if the runs had the same sequences. Runs of `ablate` are shown without each source, and
    of runs of `attention` the heads that changed are named.

    Attributes:
        runs: The folders of the runs; the first is the one to compare with.
        labels: Their names [their models, or their folders].
        out: Folder of the comparison [runs/compare-HASH].
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    labels: tuple[str, ...] = ()
    out: Path | None = None
