"""What a removed projection is replaced by: c * P, c * R, or a constant output.

P is the rectangular identity, whose row r reads coordinate r % d_model; R has random orthonormal
rows for each head. For W_O both are transposed. A constant output is the mean of the weight's
output over tokens and positions, or 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from numpy.random import SeedSequence
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.components import WEIGHTS, Projection
from nope_probe.hooks.base_layer import Heads, Layer, Vectors


class ReplacedWeight(ABC):
    """The replacement of one projection of one block."""

    @abstractmethod
    def outputs(self, y: Vectors) -> Heads:
        """Return the output of the replacement of W_Q, W_K or W_V, for every query head."""

    @abstractmethod
    def summed(self, z: Heads, heads: Sequence[int]) -> Vectors:
        """Return what some heads add to the output of the replacement of W_O."""


class IdentityWeight(ReplacedWeight):
    """c * P, the same coordinates for every weight.

    Args:
        layer: the block.
        c: the gain.
    """

    def __init__(self, layer: Layer, c: float) -> None:
        self.layer, self.c = layer, c

    def outputs(self, y: Vectors) -> Heads:
        return self.c * project_identity(y, self.layer.n_heads, self.layer.d_head)

    def summed(self, z: Heads, heads: Sequence[int]) -> Vectors:
        kept = z
        if len(heads) < self.layer.n_heads:
            kept = torch.zeros_like(z)
            kept[:, :, heads] = z[:, :, heads]
        flat = rearrange(kept, "batch pos head d_head -> batch pos (head d_head)")
        return self.c * project_identity_transposed(flat, self.layer.d_model)


class RandomWeight(ReplacedWeight):
    """c * R, a projection of the weight's size in a random basis.

    Args:
        rows: R, orthonormal rows for each head.
        c: the gain.
    """

    def __init__(self, rows: Float[Tensor, "head d_head d_model"], c: float) -> None:
        self.rows, self.c = rows, c

    def outputs(self, y: Vectors) -> Heads:
        self.rows = self.rows.to(y)
        return self.c * torch.einsum("bpm,hdm->bphd", y, self.rows)

    def summed(self, z: Heads, heads: Sequence[int]) -> Vectors:
        self.rows = self.rows.to(z)
        return self.c * torch.einsum("bphd,hdm->bpm", z[:, :, heads], self.rows[heads])


class ConstantWeight(ReplacedWeight):
    """A weight of 0, and as bias a constant output.

    Args:
        constant: the output of each query head; of W_O, what each head adds to it.
    """

    def __init__(self, constant: Float[Tensor, "head width"]) -> None:
        self.constant = constant

    def outputs(self, y: Vectors) -> Heads:
        self.constant = self.constant.to(y)
        return self.constant.expand(*y.shape[:2], -1, -1)

    def summed(self, z: Heads, heads: Sequence[int]) -> Vectors:
        self.constant = self.constant.to(z)
        return self.constant[heads].sum(0).expand(*z.shape[:2], -1)


def project_identity(
    y: Float[Tensor, "batch pos d_model"], n_heads: int, d_head: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Apply P, whose row r reads coordinate r % d_model; rows are those of all heads."""
    width = n_heads * d_head
    repeated = y.repeat(1, 1, -(-width // y.shape[-1])) if width > y.shape[-1] else y
    heads = "batch pos (head d_head) -> batch pos head d_head"
    return rearrange(repeated[..., :width], heads, head=n_heads)


def project_identity_transposed(
    z: Float[Tensor, "batch pos width"], d_model: int
) -> Float[Tensor, "batch pos d_model"]:
    """Apply P transposed: coordinate m sums the rows r with r % d_model == m."""
    padded = pad(z, (0, -z.shape[-1] % d_model))
    return padded.unflatten(-1, (-1, d_model)).sum(-2)


def random_rows(layer: Layer, name: Projection, seed: int) -> Float[Tensor, "head d_head d_model"]:
    """Draw R for one projection: for each head, random rows that are orthonormal.

    The draw depends on seed, projection and layer alone: it is made on the CPU, in float64. Heads
    wider than d_model, whose rows cannot all be orthogonal, get several blocks of orthonormal rows.
    """
    entropy = SeedSequence([seed, layer.index, WEIGHTS.index(name)])
    generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
    blocks, size = -(-layer.d_head // layer.d_model), min(layer.d_head, layer.d_model)
    shape = (layer.n_heads, blocks, layer.d_model, size)
    basis, triangle = torch.linalg.qr(torch.randn(*shape, generator=generator).double())
    # QR leaves signs open, and libraries differ: the diagonal of its second factor is positive.
    basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rows = rearrange(basis, "head block m row -> head (block row) m")
    return rows[:, : layer.d_head].float()


def norm_gain(layer: Layer, name: Projection) -> float:
    """Return the gain `norm`, ||W||_F / sqrt(rows), rows counted on the side of the heads."""
    weight = layer.weight(name).detach()
    n_heads = layer.n_kv_heads if name in ("w_k", "w_v") else layer.n_heads
    return float(weight.float().norm() / (n_heads * layer.d_head) ** 0.5)
