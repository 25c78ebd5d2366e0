"""What the `reproduce` command prints."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from nope_probe.experiments.console import print_lines
from nope_probe.experiments.paper.claim import Claim
from nope_probe.runtime.folder import read_manifest


def print_summary(folder: Path) -> None:
    """Print a figure's claims with their verdicts, its headline, and the path of its page."""
    manifest = read_manifest(folder)
    figure = manifest["settings"]["figure"]
    lines = [f"{figure}: {each}" for each in manifest["notes"]]
    for entry in manifest["claims"]:
        claim = {name: entry[name] for name in ("paper", "reproduced", "evidence")}
        lead = f"{figure}, {entry['experiment']}" if entry["experiment"] else figure
        lines.append(f"{lead}, {Claim(**claim)}")
    lines += [f"{figure}: {each}" for each in manifest["headline"]]
    for each in manifest["experiments"].values():
        lines.append(f"experiment: {Path(os.path.normpath(folder / each)) / 'report.html'}")
    print_lines([*lines, f"report: {folder / 'report.html'}"])


def print_index(folder: Path) -> None:
    """Print the lines of the page, and its path."""
    table = pd.read_csv(folder / "figures.csv", keep_default_na=False)
    lines = []
    for row in table.to_dict("records"):
        if row["figure"]:
            lines.append(str(row["figure"]))
        parts = [str(row[name]) for name in table.columns[1:] if row[name]]
        lines.append("  " + "; ".join(parts).replace("\u00a0", " "))
    print_lines([*lines, f"report: {folder / 'report.html'}"])
