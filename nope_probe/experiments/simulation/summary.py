"""The simulation's headline."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nope_probe.analyses.parameter_free.monotonicity import (
    MonotonicityTest,
)
from nope_probe.analyses.parameter_free.simulation import Simulation


def headline(alpha: float, verdicts: list[MonotonicityTest], found: Simulation) -> str:
    """Return at one alpha which layers increase in j, with how many samples and what error."""
    said = "; ".join(f"L{rise.layer} {_said(rise)}" for rise in verdicts)
    worst = float(found.best.pooled_se.max())
    return (
        f"alpha = {alpha:g}, in j: {said}. {found.n_samples} samples, "
        f"standard error {worst:.1e} nats in the worst layer."
    )


def _said(rise: MonotonicityTest) -> str:
    fall = rise.fall
    if fall.high < 0:
        half = (fall.high - fall.low) / 2
        return (
            f"{rise.verdict} (where theory falls, by {fall.value:.1e} ± {half:.0e} nats a step, "
            f"theory {rise.theory_fall:.1e})"
        )
    return rise.verdict


def print_summary(manifest: Mapping[str, Any], folder: Path) -> None:
    """Print the headline of a run and where its report is."""
    lines = [*manifest["headline"], f"report: {folder / 'report.html'}"]
    sys.stdout.write("\n".join(lines) + "\n")
