"""Ablation: what to remove from a model, where, and what to put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nope_probe.hooks.names import (
    COMPONENTS,
    GAINS,
    REPLACEMENTS,
    WEIGHTS,
    Component,
    Gain,
    Projection,
    Replacement,
)


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What to remove, and where.

    Attributes:
        remove: components.
        layers: block numbers from 0; None for all.
        replacement: what stands for a removed projection. `identity`: c * P, where row r of P reads
            coordinate r % d_model (for W_O: its transpose); `random`: c * R, orthonormal rows (for
            W_O: columns) drawn per head from the seed; `mean`: the mean of its output over tokens
            and positions, which `calibrate` measures; `zero`: 0.
        gain: c, the size of the replacements `identity` and `random` (`mean` and `zero` have none).
            `output`: such that the replacement's output has the RMS that the projection's has over
            the run's tokens in the intact model, which `calibrate` measures; `norm`: the
            projection's Frobenius norm over the root of its rows; `identity`: 1.
        seed: of the replacement `random`.
        prefix: how many first positions lose the mask among themselves, a bidirectional prefix;
            later queries keep theirs (causal, or a sliding window). None: the mask is off for all.

    Raises:
        ValueError: for a component, replacement or gain that does not exist, or a prefix without
            the mask.

    Example:
        >>> from nope_probe import Ablation
        >>> Ablation(remove=["mask", "w_q"], layers=[0, 1], gain="norm").remove
        ['mask', 'w_q']
    """

    remove: Sequence[Component] = ()
    layers: Sequence[int] | None = None
    replacement: Replacement = "identity"
    gain: Gain = "output"
    seed: int = 0
    prefix: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.remove if name not in COMPONENTS]
        if unknown:
            raise ValueError(f"unknown component {unknown[0]!r}; there are {', '.join(COMPONENTS)}")
        if self.replacement not in REPLACEMENTS:
            there_are = ", ".join(REPLACEMENTS)
            raise ValueError(f"unknown replacement {self.replacement!r}; there are {there_are}")
        if self.gain not in GAINS:
            raise ValueError(f"unknown gain {self.gain!r}; there are {', '.join(GAINS)}")
        if self.prefix is not None:
            self._validate_prefix(self.prefix)

    def _validate_prefix(self, prefix: int) -> None:
        if prefix < 1:
            raise ValueError(f"expected a prefix of 1 position or more, got {prefix}")
        if "mask" not in self.remove:
            removed = ", ".join(self.remove) or "nothing"
            raise ValueError(f"a prefix is for removing the mask; this removes {removed}")

    @property
    def weights(self) -> tuple[Projection, ...]:
        """The projections among the components to remove."""
        return tuple(name for name in WEIGHTS if name in self.remove)

    @property
    def needs_calibration(self) -> bool:
        """Whether gains or means have to be measured first."""
        if self.replacement in ("mean", "zero"):
            return self.replacement == "mean" and bool(self.weights)
        return self.gain == "output" and bool(self.weights)
