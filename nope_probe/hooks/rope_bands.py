"""Bands of rotary pairs: which pairs of RoPE a name stands for.

`rope` is all pairs; `rope_high` those whose wavelength 2 pi / theta is below the length of the
sequences, `rope_low` the rest; `rope[a:b]` the pairs a to b - 1, from 0, the fastest first.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import pi

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ROPE_HALVES = ("rope_high", "rope_low")
_BAND = re.compile(r"rope\[(\d+):(\d+)\]")


def is_rope(name: str) -> bool:
    """Return whether a name stands for RoPE or a band of it.

    Example:
        >>> is_rope("rope"), is_rope("rope_low"), is_rope("rope[0:4]"), is_rope("mask")
        (True, True, True, False)
    """
    return name in ("rope", *ROPE_HALVES) or _BAND.fullmatch(name) is not None


def equal_bands(n_pairs: int, n_bands: int) -> tuple[str, ...]:
    """Return the names of bands that divide all pairs as equally as possible.

    Raises:
        ValueError: for more bands than pairs, or none.

    Example:
        >>> equal_bands(8, 3)
        ('rope[0:2]', 'rope[2:5]', 'rope[5:8]')
    """
    if not 1 <= n_bands <= n_pairs:
        raise ValueError(f"expected from 1 to {n_pairs} bands for {n_pairs} pairs, got {n_bands}")
    ends = [n_pairs * band // n_bands for band in range(n_bands + 1)]
    return tuple(f"rope[{a}:{b}]" for a, b in pairwise(ends))


@dataclass(frozen=True, kw_only=True, eq=False)
class RemovedPairs:
    """The rotary pairs of one block that are removed.

    Attributes:
        bands: names of bands, or `rope`.
        frequencies: the angle per position of each pair, radians.

    Raises:
        ValueError: for a band of pairs that do not exist.
    """

    bands: Collection[str]
    frequencies: Float[Tensor, " pair"]

    def __post_init__(self) -> None:
        n = len(self.frequencies)
        for name in self.bands:
            begin, end = self._limits(name)
            if not 0 <= begin < end <= n:
                raise ValueError(f"no band {name}: the model rotates {n} pairs, rope[0:{n}]")

    def _limits(self, name: str) -> tuple[int, int]:
        found = _BAND.fullmatch(name)
        return (int(found[1]), int(found[2])) if found else (0, len(self.frequencies))

    def mask(self, n_pos: int) -> Bool[Tensor, " pair"]:
        """Return which pairs are removed in sequences of some length."""
        removed = torch.zeros(len(self.frequencies), dtype=torch.bool)
        is_high = 2 * pi / self.frequencies < n_pos
        for name in self.bands:
            begin, end = self._limits(name)
            every = {"rope_high": is_high, "rope_low": ~is_high}.get(name, torch.ones_like(is_high))
            removed[begin:end] |= every[begin:end]
        return removed
