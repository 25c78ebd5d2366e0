"""The `compare` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nope_probe.run.settings import SessionSettings

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(SessionSettings):
    """Compare finished runs of one command with the first run.

    Puts their tables side by side, on one page and in differences.csv: differences with intervals,
    paired if the runs had the same sequences. Runs of `ablate` are shown without each source.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        _arg(help="The folders of the runs; the first is the one to compare with."),
    ]
    labels: Annotated[
        tuple[str, ...], _arg(help="Their names [their models, or their folders].")
    ] = ()
    out: Annotated[Path | None, _arg(help="Folder of the comparison [runs/compare-HASH].")] = None
