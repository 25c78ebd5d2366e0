"""The maps of a block, and the views on them that the circuit figure offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from nope_probe.figures.downsample import pool
from nope_probe.hooks.names import LETTERS, SCORE_STAGES, Letter

RAW, DIAGONAL, CHANGE = "raw", "less diagonal means", "change"
MIDDLE = (5, 95)  # percentiles of the cells off the diagonal, between which colours run


@dataclass(frozen=True, kw_only=True)
class Circuit:
    """What the circuit figure shows of one block.

    Attributes:
        layer: the block's number, from 0.
        maps: per letter its Gram map, or score map in nats for (b) and (i); NaN where masked.
        normalised: the same maps less the mean of each diagonal, as `diagonal_normalised` of
            `analyses.pattern` returns them; empty for a figure without this view.
        absent: per letter that the block lacks, why.
        components: the model's components, such as `mask`, `rope`, `w_q`.
        removed: the components that an ablation removed.
        reference: the intact model's maps, for the change against it; empty without an ablation.
    """

    layer: int
    maps: Mapping[str, Float[np.ndarray, "query_pos key_pos"]]
    normalised: Mapping[str, Float[np.ndarray, "query_pos key_pos"]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    components: Sequence[str] = ()
    removed: Sequence[str] = ()
    reference: Mapping[str, Float[np.ndarray, "query_pos key_pos"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted({*self.maps} - {*LETTERS})
        if unknown or not self.maps:
            got = " ".join(unknown) or "none"
            raise ValueError(f"expected maps of the stages a to i, got {got}")
        for name in ("normalised", "reference"):
            given = getattr(self, name)
            missing = sorted({*self.maps} - {*given})
            if given and missing:
                raise ValueError(f"the {name} maps lack the stages {' '.join(missing)}")


def views(data: Circuit) -> tuple[str, ...]:
    """Return the names of the views for which there are maps."""
    normalised = (DIAGONAL,) if data.normalised else ()
    return (RAW, *normalised, CHANGE) if data.reference else (RAW, *normalised)


def cells(data: Circuit, view: str, max_positions: int) -> dict[Letter, tuple[np.ndarray, int]]:
    """Return each stage's values in one view, pooled, with the positions per block."""
    found = {}
    for letter in (each for each in LETTERS if each in data.maps):
        values = np.asarray((data.normalised if view == DIAGONAL else data.maps)[letter])
        if view == CHANGE:
            values = values - np.asarray(data.reference[letter])
        pooled = pool(values[None], max_positions)
        found[letter] = pooled.values[0], pooled.block
    return found


def limits(values: np.ndarray, view: str) -> tuple[float, float]:
    """Return colour limits: the middle 90% of the cells off the diagonal, around 0 unless raw."""
    off = values[np.isfinite(values) & ~np.eye(len(values), dtype=bool)]
    off = off if off.size else values[np.isfinite(values)]
    if not off.size:
        return 0.0, 1.0
    if view != RAW:
        top = float(np.percentile(np.abs(off), MIDDLE[1])) or 1.0
        return -top, top
    low, high = np.percentile(off, MIDDLE)
    return float(low), float(high)


def group_limits(
    letter: Letter, scales: Mapping[Letter, tuple[float, float]]
) -> tuple[float, float]:
    """Return the limits that hold all maps of a kind: inner products, or scores."""
    is_score = letter in SCORE_STAGES
    group = [scale for name, scale in scales.items() if (name in SCORE_STAGES) == is_score]
    return min(low for low, _ in group), max(high for _, high in group)
