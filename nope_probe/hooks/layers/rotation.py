"""RoPE: the recognition of a block's rotation, and the removal of some pairs' rotation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import pi

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import HeadVectors
from nope_probe.maps.positions import Angles, Rotation, cos_and_sin
from nope_probe.removal import Component

FITS = 1e-3  # relative error up to which a rotation is recognised


def fit_rotary(
    angles: Angles | None,
    turned: Float[Tensor, "head d_head"],
    straight: Float[Tensor, "head d_head"],
) -> Rotation | None:
    """Return a block's rotation, from its queries at position 1; None if it does not rotate.

    Args:
        angles: the block's angles of positions 0 and 1, if it takes any.
        turned: the block's queries.
        straight: the queries with the angles of position 0.
    """
    if torch.equal(turned, straight):
        return None
    if angles is None or (isinstance(angles, Tensor) and not angles.is_complex()):
        return Rotation(pairs=None, cos=torch.zeros(2, 0), sin=torch.zeros(2, 0))
    cos, sin = (table.flatten(0, -3)[0].double().cpu() for table in cos_and_sin(angles))
    angle = torch.atan2(sin[1], cos[1])
    fits = max(FITS, 8 * torch.finfo(turned.dtype).eps) * float(turned.abs().max())
    turned, straight = turned.double().cpu(), straight.double().cpu()[None]
    n, half = len(angle), torch.arange(len(angle) // 2)
    layouts = [torch.arange(n)]  # one column for each pair
    if (
        n % 2 == 0
    ):  # the same pairs again, behind the last (0 1 0 1) or next to each other (0 0 1 1)
        layouts = [half.repeat(2), half.repeat_interleave(2), *layouts]
    for columns in layouts:
        blank = cos.new_zeros(2, int(columns.max()) + 1)
        rotation = Rotation(pairs=None, cos=blank, sin=blank, columns=columns).at((cos, sin))
        if not torch.allclose(rotation.frequencies[columns], angle):
            continue
        for pairs in _possible_pairs(blank.shape[1], turned.shape[-1]):
            known = replace(rotation, pairs=pairs)
            expected = known.among(slice(1, 2)).turned(straight)
            if (expected[0] - turned).abs().max() <= fits:
                return known
    return rotation


def _possible_pairs(n_pairs: int, d_head: int) -> list[Int[Tensor, "pair two"]]:
    """Return the layouts of pairs in use, in the first coordinates of a head or in the last."""
    number, layouts = torch.arange(n_pairs), []
    for begin in dict.fromkeys((0, d_head - 2 * n_pairs)):
        if 0 <= begin <= d_head - 2 * n_pairs:
            layouts.append(begin + torch.stack((number, number + n_pairs), -1))
            layouts.append(begin + torch.stack((2 * number, 2 * number + 1), -1))
    return layouts


@dataclass(frozen=True, kw_only=True, eq=False)
class RemovedPairs:
    """The rotary pairs of one block that are removed: rotated as at position 0.

    Attributes:
        bands: bands of RoPE, or `rope`.
        rotary: the block's rotation.

    Raises:
        UserError: for a band of pairs that do not exist.
    """

    bands: Collection[Component]
    rotary: Rotation

    def __post_init__(self) -> None:
        n = len(self.rotary.frequencies)
        for name in self.bands:
            begin, end = name.pairs or (0, n)
            if name.is_band and not 0 <= begin < end <= n:
                raise UserError(f"no band {name}: the model rotates {n} pairs, rope[0:{n}]")

    def mask(self, n_pos: int) -> Bool[Tensor, " pair"]:
        """Return a mask of the removed pairs, for sequences of n_pos tokens."""
        removed = torch.zeros(len(self.rotary.frequencies), dtype=torch.bool)
        is_high = 2 * pi / self.rotary.frequencies < n_pos
        for name in self.bands:
            begin, end = name.pairs or (0, len(removed))
            every = {"rope_high": is_high, "rope_low": ~is_high}.get(name, torch.ones_like(is_high))
            removed[begin:end] |= every[begin:end]
        return removed

    def _mask_at(self, angles: Angles) -> Bool[Tensor, " pair"]:
        """Return a mask of the removed pairs, by the frequencies and the length of a pass."""
        n_pos = cos_and_sin(angles)[0].shape[-2]
        of_length = n_pos > 1 and any(name.of_length for name in self.bands)
        return (replace(self, rotary=self.rotary.at(angles)) if of_length else self).mask(n_pos)

    def straightened(self, angles: Angles) -> Angles:
        """Return a model's angles, with the angles of position 0 in the removed pairs."""
        if isinstance(angles, Tensor) and not angles.is_complex():
            return torch.zeros_like(angles)
        assert self.rotary.columns is not None
        first = angles if isinstance(angles, Tensor) else angles[0]
        removed = self._mask_at(angles)[self.rotary.columns].to(first.device)
        if isinstance(angles, Tensor):
            return angles.masked_fill(removed, self.rotary.factor)
        cos, sin = angles
        return cos.masked_fill(removed, self.rotary.factor), sin.masked_fill(removed, 0.0)

    def turned_back(self, x: HeadVectors, angles: Angles) -> HeadVectors:
        """Return rotated queries or keys, with the removed pairs as at position 0.

        Raises:
            NotImplementedError: if the pairs' coordinates are not known.
        """
        return self.rotary.at(angles).of(self._mask_at(angles)).turned_back(x)
