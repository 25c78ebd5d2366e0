"""RoPE: a block's rotation of queries and keys, and the removal of some pairs' rotation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import pi
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.maps.positions import turned_in_pairs
from nope_probe.removal import Component

# The angles of all positions, as a model passes them to attention: cos and sin, complex numbers, or
# the positions themselves.
Angles: TypeAlias = tuple[Tensor, Tensor] | Tensor
Heads = Float[Tensor, "batch pos head d_head"]
FITS = 1e-3  # relative error up to which a rotation is recognised


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """The rotation of queries and keys in one block.

    Attributes:
        frequencies: the angle per position of each pair in short sequences, radians.
        factor: multiplies rotated queries and keys at every position: the attention factor of YaRN
            and LongRoPE, 1 as a rule.
        pairs: the two coordinates of a head that each pair turns; None if they are not known.
        columns: the pair of each column of the model's angles.
    """

    frequencies: Float[Tensor, " pair"]
    factor: float
    pairs: Int[Tensor, "pair two"] | None = None
    columns: Int[Tensor, " column"] | None = None

    def at(self, angles: Angles) -> Rotary:
        """Return the rotation with the frequencies of a pass, which may depend on its length."""
        cos, sin = (turn.flatten(0, -3)[0, :2].double().cpu() for turn in self.turns(angles))
        if len(cos) < 2:
            return self
        sine, cosine = sin[1] * cos[0] - cos[1] * sin[0], cos[1] * cos[0] + sin[1] * sin[0]
        return replace(self, frequencies=torch.atan2(sine, cosine))

    def turns(
        self, angles: Angles
    ) -> tuple[Float[Tensor, "one pos pair"], Float[Tensor, "one pos pair"]]:
        """Return cos and sin of each pair at each position, times the factor."""
        assert self.columns is not None
        firsts = [self.columns.tolist().index(pair) for pair in range(len(self.frequencies))]
        cos, sin = cos_and_sin(angles)
        return cos[..., firsts], sin[..., firsts]

    def matrices(self, angles: Angles | None, d_head: int) -> Float[Tensor, "pos d_head d_head"]:
        """Return the matrix that turns a query of the first sequence at each position."""
        if angles is None or self.pairs is None:
            raise NotImplementedError("RoPE's pairs of coordinates were not recognised")
        cos, sin = (turn[0] for turn in self.turns(angles))
        (first, second), n_pos = self.pairs.T, len(cos)
        matrix = torch.eye(d_head, dtype=cos.dtype, device=cos.device).repeat(n_pos, 1, 1)
        matrix[:, first, first] = matrix[:, second, second] = cos
        matrix[:, second, first], matrix[:, first, second] = sin, -sin
        return matrix


def cos_and_sin(angles: Angles) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a model's angles."""
    return (angles.real, angles.imag) if isinstance(angles, Tensor) else angles


def fit_rotary(
    angles: Angles | None,
    turned: Float[Tensor, "head d_head"],
    straight: Float[Tensor, "head d_head"],
) -> Rotary | None:
    """Return a block's rotation, from its queries at position 1; None if it does not rotate.

    Args:
        angles: the block's angles of positions 0 and 1, if it takes any.
        turned: the block's queries.
        straight: the queries with the angles of position 0.
    """
    if torch.equal(turned, straight):
        return None
    if angles is None or (isinstance(angles, Tensor) and not angles.is_complex()):
        return Rotary(frequencies=torch.zeros(0), factor=1.0)
    cos, sin = (table.flatten(0, -3)[0].double().cpu() for table in cos_and_sin(angles))
    angle, factor = torch.atan2(sin[1], cos[1]), float(torch.hypot(cos[0, 0], sin[0, 0]))
    fits = max(FITS, 8 * torch.finfo(turned.dtype).eps) * float(turned.abs().max())
    turned, straight = turned.double().cpu(), straight.double().cpu()
    n, half = len(angle), torch.arange(len(angle) // 2)
    layouts = [torch.arange(n)]  # one column for each pair
    if (
        n % 2 == 0
    ):  # the same pairs again, behind the last (0 1 0 1) or next to each other (0 0 1 1)
        layouts = [half.repeat(2), half.repeat_interleave(2), *layouts]
    for columns in layouts:
        n_pairs = int(columns.max()) + 1
        theta = angle[[columns.tolist().index(pair) for pair in range(n_pairs)]]
        if not torch.allclose(theta[columns], angle):
            continue
        for pairs in _possible_pairs(n_pairs, turned.shape[-1]):
            first, second = pairs.T
            expected = turned_in_pairs(straight, first, second, theta.cos(), theta.sin())
            if (expected - turned).abs().max() <= fits:
                frequencies = theta.to(torch.float64)
                return Rotary(frequencies=frequencies, factor=factor, pairs=pairs, columns=columns)
    return Rotary(frequencies=angle, factor=factor, columns=torch.arange(n))


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
        ValueError: for a band of pairs that do not exist.
    """

    bands: Collection[Component]
    rotary: Rotary

    def __post_init__(self) -> None:
        n = len(self.rotary.frequencies)
        for name in self.bands:
            begin, end = name.pairs or (0, n)
            if name.is_band and not 0 <= begin < end <= n:
                raise ValueError(f"no band {name}: the model rotates {n} pairs, rope[0:{n}]")

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
        of_length = any(name.of_length for name in self.bands)
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

    def turned_back(self, x: Heads, angles: Angles) -> Heads:
        """Return rotated queries or keys, with the removed pairs as at position 0.

        Raises:
            NotImplementedError: if the pairs' coordinates are not known.
        """
        if self.rotary.pairs is None:
            raise NotImplementedError("RoPE's pairs of coordinates were not recognised")
        removed = self._mask_at(angles)
        first, second = map(_as_slice, self.rotary.pairs[removed].T)
        cos, sin = (
            turn[..., None, removed.to(turn.device)] / self.rotary.factor
            for turn in self.rotary.turns(angles)
        )
        return turned_in_pairs(x, first, second, cos, -sin)


def _as_slice(coordinates: Int[Tensor, " pair"]) -> slice | Int[Tensor, " pair"]:
    """Return evenly spaced coordinates as a slice, which reads and writes without an index."""
    numbers = coordinates.tolist()
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    spaced = range(numbers[0], numbers[-1] + 1, step) if numbers and step > 0 else range(0)
    return slice(spaced.start, spaced.stop, spaced.step) if [*spaced] == numbers else coordinates
