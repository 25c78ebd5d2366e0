"""The rotation of a block's queries and keys by RoPE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# The angles of all positions, as a model passes them to attention: cos and sin, complex numbers, or
# the positions themselves.
Angles: TypeAlias = tuple[Tensor, Tensor] | Tensor
PairLayout = Literal["halves", "adjacent", "other"]
SLOWEST = 1e-10  # radians per position; a pair below it does not turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """The rotation of queries and keys by RoPE at some positions.

    Attributes:
        pairs: the two coordinates of a head that each pair turns; None if they are not known.
        cos, sin: cos and sin of the angle of each pair at positions 0, 1, ...
        factor: multiplies turned queries and keys at every position: the attention factor of YaRN
            and LongRoPE, 1 as a rule.
        columns: the pair of each column of the model's angles; None if they are not known.

    Example:
        >>> angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
        >>> pairs = torch.tensor([[0, 2], [1, 3]])
        >>> rotation = Rotation(pairs=pairs, cos=angles.cos(), sin=angles.sin())
        >>> rotation.layout, [round(angle, 6) for angle in rotation.frequencies.tolist()]
        ('halves', [1.0, 0.1])
    """

    pairs: Int[Tensor, "pair two"] | None
    cos: Float[Tensor, "*batch pos pair"]
    sin: Float[Tensor, "*batch pos pair"]
    factor: float = 1.0
    columns: Int[Tensor, " column"] | None = None

    @property
    def known_pairs(self) -> Int[Tensor, "pair two"]:
        """The pairs.

        Raises:
            NotImplementedError: if they are not known.
        """
        if self.pairs is None:
            raise NotImplementedError("RoPE's pairs of coordinates were not recognised")
        return self.pairs

    @property
    def frequencies(self) -> Float[Tensor, " pair"]:
        """The angle of each pair per position, radians, from positions 0 and 1.

        It is negative where the second coordinate of a pair turns to the first.
        """
        cos, sin = (x[(0,) * (x.ndim - 2)][:2].double().cpu() for x in (self.cos, self.sin))
        sine, cosine = sin[1] * cos[0] - cos[1] * sin[0], cos[1] * cos[0] + sin[1] * sin[0]
        return torch.atan2(sine, cosine)

    @property
    def layout(self) -> PairLayout | None:
        """`halves` for the pairs (f, f + n), `adjacent` for (2f, 2f + 1); None without pairs."""
        if not len(self.known_pairs):
            return None
        low, high = self.known_pairs.T
        f, n = torch.arange(len(low)), len(low)
        if torch.equal(low, f) and torch.equal(high, f + n):
            return "halves"
        adjacent = torch.equal(low, 2 * f) and torch.equal(high, 2 * f + 1)
        return "adjacent" if adjacent else "other"

    def at(self, angles: Angles) -> Rotation:
        """Return the rotation in a pass, whose frequencies may depend on the pass's length."""
        assert self.columns is not None
        firsts = [self.columns.tolist().index(pair) for pair in range(self.cos.shape[-1])]
        cos, sin = (table[..., firsts] for table in cos_and_sin(angles))
        factor = float(torch.hypot(cos.double(), sin.double()).flatten()[0])
        return replace(self, cos=cos / factor, sin=sin / factor, factor=factor)

    def of(self, pairs: Bool[Tensor, " pair"]) -> Rotation:
        """Return the rotation of some pairs alone."""
        cos, sin = (x[..., pairs.to(x.device)] for x in (self.cos, self.sin))
        return replace(self, pairs=self.known_pairs[pairs], cos=cos, sin=sin, columns=None)

    def among(self, positions: slice) -> Rotation:
        """Return the rotation at some of the positions."""
        cos, sin = (x[..., positions, :].clone() for x in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin)

    @property
    def turning(self) -> Rotation:
        """The rotation of the pairs that turn."""
        return self.of(self.frequencies.abs() > SLOWEST)

    def turned(
        self, x: Float[Tensor, "*batch pos head d_head"]
    ) -> Float[Tensor, "*batch pos head d_head"]:
        """Return queries or keys turned as at their positions."""
        return self._turned(x, self.sin)

    def turned_back(
        self, x: Float[Tensor, "*batch pos head d_head"]
    ) -> Float[Tensor, "*batch pos head d_head"]:
        """Return turned queries or keys as at position 0."""
        return self._turned(x, -self.sin)

    def _turned(self, x: Tensor, sin: Tensor) -> Tensor:
        if not len(self.known_pairs):
            return x
        first, second = map(_as_slice, self.known_pairs.T)
        result, low, high = x.clone(), x[..., first], x[..., second]
        at_least_float32 = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (y[..., None, :].to(x.device, at_least_float32) for y in (self.cos, sin))
        result[..., first] = (low * cos - high * sin).to(x.dtype)
        result[..., second] = (high * cos + low * sin).to(x.dtype)
        return result


NO_ROTATION = Rotation(
    pairs=torch.zeros(0, 2, dtype=torch.long), cos=torch.zeros(2, 0), sin=torch.zeros(2, 0)
)


def cos_and_sin(angles: Angles) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a model's angles."""
    return (angles.real, angles.imag) if isinstance(angles, Tensor) else angles


def _as_slice(coordinates: Int[Tensor, " pair"]) -> slice | Int[Tensor, " pair"]:
    """Return evenly spaced coordinates as a slice, which reads and writes without an index."""
    numbers = coordinates.tolist()
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    spaced = range(numbers[0], numbers[-1] + 1, step) if numbers and step > 0 else range(0)
    return slice(spaced.start, spaced.stop, spaced.step) if [*spaced] == numbers else coordinates
