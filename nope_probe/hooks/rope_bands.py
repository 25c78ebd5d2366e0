"""Which rotary pairs of a block the names of bands stand for; see `components.is_rope`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.components import BAND


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """How one block rotates queries and keys.

    Attributes:
        frequencies: the angle per position of each pair, radians.
        factor: what rotated queries and keys are multiplied with at every position, 1 as a rule;
            the attention factor of YaRN and LongRoPE.
    """

    frequencies: Float[Tensor, " pair"]
    factor: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RemovedPairs:
    """The rotary pairs of one block that are removed: rotated as at position 0.

    Attributes:
        bands: names of bands, or `rope`.
        rotary: how the block rotates its pairs.

    Raises:
        ValueError: for a band of pairs that do not exist.
    """

    bands: Collection[str]
    rotary: Rotary

    def __post_init__(self) -> None:
        n = len(self.rotary.frequencies)
        for name in self.bands:
            begin, end = self._limits(name)
            if not 0 <= begin < end <= n:
                raise ValueError(f"no band {name}: the model rotates {n} pairs, rope[0:{n}]")

    def _limits(self, name: str) -> tuple[int, int]:
        found = BAND.fullmatch(name)
        return (int(found[1]), int(found[2])) if found else (0, len(self.rotary.frequencies))

    def mask(self, n_pos: int) -> Bool[Tensor, " pair"]:
        """Return which pairs are removed in sequences of some length."""
        removed = torch.zeros(len(self.rotary.frequencies), dtype=torch.bool)
        is_high = 2 * pi / self.rotary.frequencies < n_pos
        for name in self.bands:
            begin, end = self._limits(name)
            every = {"rope_high": is_high, "rope_low": ~is_high}.get(name, torch.ones_like(is_high))
            removed[begin:end] |= every[begin:end]
        return removed


def angle_per_pair(angles: Float[Tensor, " d_rotary"], twice: bool) -> Float[Tensor, " pair"]:
    """Return one angle per pair from those of all coordinates, 0 0 1 1 or 0 1 0 1."""
    return (angles[::2] if twice else angles[: len(angles) // 2]).cpu()
