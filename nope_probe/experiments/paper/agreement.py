"""Published panels against ours, in steps of the panel's own colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.paper.panels import Cells, Panel

PAPERS_SAMPLES = 100_000
NOISE_MARGIN = 1.5  # differences up to this times the expected noise count as noise


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A published panel and our map of the same quantity.

    Attributes:
        group: the panels with which it is drawn.
        name: what it shows, in the paper's count and ours.
        published: the panel.
        ours: our map, of any size.
        comparable: whether both are of the same model, so that values may be subtracted.
        noise: the standard error that the published panel and ours have together, in the panel's
            unit; NaN if it is not known.
    """

    group: str
    name: str
    published: Panel
    ours: Cells
    comparable: bool
    noise: float = float("nan")

    @property
    def steps(self) -> Cells | None:
        """Ours less the published panel, in colour steps; None where they cannot be compared.

        Our map is clipped as the paper's is.
        """
        panel = self.published
        if not self.comparable:
            return None
        ours = resampled(self.ours, len(panel.values)).clip(panel.low, panel.high)
        return (ours - panel.values) / panel.step


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well a published panel and ours agree.

    Attributes:
        key: the panel.
        name: what it shows.
        cells: how many cells are compared.
        step: what one colour spans, in the panel's unit.
        largest: the largest difference, in steps.
        within_one: the share of the cells that differ by at most one step.
        rms: the root mean square of the differences, in steps.
        noise: what sampling noise and the rounding to colours let one expect of it, in steps.
        agrees: whether all cells are within one step, or the differences within the noise.
    """

    key: str
    name: str
    cells: int
    step: float
    largest: float
    within_one: float
    rms: float
    noise: float
    agrees: bool

    def __str__(self) -> str:
        if self.within_one == 1:
            return f"within one colour step (largest difference {self.largest:.2f} steps)"
        text = f"differs by {self.rms:.2g} steps RMS, up to {self.largest:.3g}"
        if np.isnan(self.noise):
            return text
        verdict = "as expected from noise" if self.agrees else "more than expected from noise"
        return f"{text}; {verdict}, {self.noise:.2g} steps RMS"


def agreement(pair: Pair) -> Agreement | None:
    """Return how well a pair agrees; None where it cannot be compared."""
    steps = pair.steps
    if steps is None or not np.isfinite(steps).any():
        return None
    known = np.abs(steps[np.isfinite(steps)])
    rms = float(np.sqrt(np.mean(known**2)))
    noise = float(np.hypot(pair.noise / pair.published.step, 12**-0.5))
    return Agreement(
        key=pair.published.key,
        name=f"{pair.group}, {pair.name}",
        cells=known.size,
        step=pair.published.step,
        largest=float(known.max()),
        within_one=float(np.mean(known <= 1)),
        rms=rms,
        noise=noise,
        agrees=bool((known <= 1).all() or rms <= NOISE_MARGIN * noise),
    )


def agreements(pairs: Sequence[Pair]) -> list[Agreement]:
    """Return how well the pairs agree that can be compared."""
    return [found for found in map(agreement, pairs) if found is not None]


def verdict(found: Sequence[Agreement]) -> str:
    """Return how many panels agree, in one sentence."""
    exact = [each for each in found if each.within_one == 1]
    rest = [each for each in found if each.within_one < 1]
    sentence = f"{len(exact)} of {len(found)} published panels agree within one 8-bit colour step"
    if exact:
        sentence += f" (largest difference {max(each.largest for each in exact):.2f} steps)"
    if rest:
        noisy = sum(each.agrees for each in rest)
        sentence += f"; of the other {len(rest)}, {noisy} agree within sampling noise"
    return sentence + "."


def agreement_table(found: Sequence[Agreement]) -> pd.DataFrame:
    """Return the table of panels, one row each; empty for none."""
    columns = list(Agreement.__dataclass_fields__)
    return pd.DataFrame([vars(each) for each in found], columns=columns)


def resampled(
    values: Float[np.ndarray, "pos pos"], size: int
) -> Float[np.ndarray, "{size} {size}"]:
    """Return a map drawn on `size` pixels: means over the part of each cell that a pixel covers.

    A mean leaves out cells without a number; a pixel without any is NaN.

    Example:
        >>> resampled(np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan], [1.0, 1.0, 1.0]]), 1)
        array([[2.]])
    """
    n = len(values)
    if n == size:
        return np.asarray(values, np.float64)
    edges = np.arange(size + 1) * n / size
    low, high = edges[:-1, None], edges[1:, None]
    cells = np.arange(n)[None]
    cover = (np.minimum(high, cells + 1) - np.maximum(low, cells)).clip(0)
    known = np.isfinite(values)
    sums, weights = (cover @ each @ cover.T for each in (np.where(known, values, 0.0), known * 1.0))
    return np.where(weights > 0, sums / np.where(weights > 0, weights, 1), np.nan)
