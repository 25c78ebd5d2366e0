"""Recover RoPE from the rotation that a block applies: which pairs turn, how fast, and its base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Layout = Literal["halves", "adjacent", "other"]
SLOWEST = 1e-10  # radians per position; below it a coordinate does not turn
FOLLOWS = 1e-3  # relative deviation of a frequency that still follows the power law


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How a block turns the coordinates of its queries and keys.

    Attributes:
        pairs: the two coordinates of each pair that turns, in the order of the first.
        frequencies: by how much each pair turns from one position to the next, radians.
        size: the length of a turned unit vector at position 0 (1, unless RoPE also scales).
    """

    pairs: Int[Tensor, "pair two"]
    frequencies: Float[Tensor, " pair"]
    size: float

    @property
    def layout(self) -> Layout | None:
        """`halves` for the pairs (f, f + n), `adjacent` for (2f, 2f + 1); None without pairs."""
        if not len(self.pairs):
            return None
        low, high = self.pairs.T
        f, n = torch.arange(len(self.pairs)), len(self.pairs)
        if torch.equal(low, f) and torch.equal(high, f + n):
            return "halves"
        adjacent = torch.equal(low, 2 * f) and torch.equal(high, 2 * f + 1)
        return "adjacent" if adjacent else "other"


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """Frequencies theta_0 base^(-f/n) of the pairs f = 0, ..., n - 1.

    Attributes:
        base: RoPE's base; None if no law shows: of a single pair, or if the third pair is off.
        fastest: theta_0, 1 unless positions are interpolated.
        n_following: how many of the first pairs follow the law; further ones are slowed down, as in
            Llama 3.1 and YaRN.
    """

    base: float | None
    fastest: float
    n_following: int


def recover_rotation(matrices: Float[Tensor, "pos d_head d_head"]) -> Rotation:
    """Return the rotation from the matrix that a block applies at each position.

    Args:
        matrices: M of y = M x at positions 0, 1, ...; only the first two are used.

    Example:
        >>> turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> recover_rotation(torch.stack([torch.eye(3), turn])).pairs
        tensor([[0, 1]])
    """
    first, second = matrices[:2].double()
    step = second @ torch.linalg.inv(first)
    off = step - torch.diag(step.diag())
    strength, partner = off.abs().max(-1)
    low = ((strength > SLOWEST) & (torch.arange(len(step)) < partner)).nonzero().flatten()
    high = partner[low]
    angles = torch.atan2(step[high, low], step[low, low])
    size = float(first[:, low].norm(dim=0).mean()) if len(low) else 1.0
    return Rotation(pairs=torch.stack([low, high], -1), frequencies=angles, size=size)


def power_law(frequencies: Float[Tensor, " pair"]) -> PowerLaw:
    """Return the power law that the first frequencies follow.

    Example:
        >>> law = power_law(100.0 ** (-torch.arange(4.0) / 4))
        >>> round(law.base), law.n_following
        (100, 4)
    """
    logs = frequencies.abs().double().log()
    n = len(logs)
    if n < 2:
        return PowerLaw(base=None, fastest=float(frequencies[0]), n_following=n)
    f = torch.arange(n, dtype=torch.float64)
    follows = (logs - (logs[0] + f * (logs[1] - logs[0]))).abs() < FOLLOWS
    m = int(follows.long().cumprod(0).sum())
    centred = f[:m] - f[:m].mean()
    slope = float((centred * logs[:m]).sum() / centred.square().sum())
    shows = m >= min(3, n)  # any two points lie on a line
    base = float(torch.tensor(-slope * n, dtype=torch.float64).exp()) if shows else None
    return PowerLaw(base=base, fastest=float(frequencies[0]), n_following=m)
