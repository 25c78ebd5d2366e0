"""The `compare` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from nope_probe.run.settings import SessionSettings


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
