"""The headline of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.experiments.summary import print_headline

if TYPE_CHECKING:
    from nope_probe.analyses.parameter_free.monotonicity import MonotonicityTest
    from nope_probe.analyses.parameter_free.simulation import Simulation


def headline(alpha: float, tests: Sequence[MonotonicityTest], simulation: Simulation) -> str:
    """Return which layers increase in j at one alpha, from how many samples, with what error."""
    verdicts = "; ".join(f"L{test.layer} {_verdict(test)}" for test in tests)
    worst = float(simulation.best.pooled_se.max())
    return (
        f"alpha = {alpha:g}, in j: {verdicts}. {simulation.n_samples} samples, "
        f"standard error {worst:.1e} nats in the worst layer."
    )


def _verdict(test: MonotonicityTest) -> str:
    fall = test.fall
    if fall.high < 0:
        half = (fall.high - fall.low) / 2
        return (
            f"{test.verdict} (where theory falls, by {fall.value:.1e} ± {half:.0e} nats a step, "
            f"theory {test.theory_fall:.1e})"
        )
    return test.verdict


def print_summary(manifest: Mapping[str, Any], folder: Path) -> None:
    """Print the headline of a run and the path of its report."""
    print_headline(manifest, folder)
