"""The paper's appendix A with its errata corrected: h' and g' without residual.

Symbols are those of `parameter_free/theory.py`: E = e^alpha, and positions count from 1.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.analyses.parameter_free.theory import attend, rope_frequencies

Alphas = Float[Tensor, " alpha"]
Positions = Int[Tensor, " pos"]
PerPosition = Float[Tensor, "alpha pos"]


def g_no_residual(alpha: Alphas, i: Positions) -> PerPosition:
    """Return g', the g of a layer without its residual connection (A.2)."""
    a, e_a, i = broadcast(alpha, i)
    return (math.e * a + e_a * (1 + a * (i - 2))) / (math.e + (i - 1) * e_a)


def h_squared_no_residual(alpha: Alphas, i: Positions) -> PerPosition:
    """Return h'^2, the h^2 of a layer without its residual connection (A.2)."""
    a, e_a, i = broadcast(alpha, i)
    others = (i - 1) * (1 + a * (i - 2))
    squares = math.e**2 + 2 * math.e * e_a * a * (i - 1) + e_a**2 * others
    return squares / (math.e + (i - 1) * e_a) ** 2


def broadcast(alpha: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    alpha = alpha.double()[:, None]
    return alpha, alpha.exp(), position.double()[None]


def frequency_steps(
    gram: Float[Tensor, "*batch part frequency pos pos2"], n_layers: int, spec: ParameterFreeSpec
) -> Iterator[Float[Tensor, "*batch query_pos key_pos"]]:
    """Carry frequency-resolved Gram matrices through the layers, and yield each layer's scores.

    Args:
        gram: real and imaginary part of the mean of z_i conj(z_j) of the normed inputs, where
            z = x[f] + i x[f + d/2].
        n_layers: layers.
        spec: which parameter-free transformer, with RoPE.
    """
    position = torch.arange(gram.shape[-1], dtype=torch.float64)
    lag = position[:, None] - position[None, :]
    turn = rope_frequencies(spec.dimension)[:, None, None] * lag
    gram = spec.start_scale * gram
    for _ in range(n_layers):
        real, imaginary = gram.unbind(-4)
        rotated = (turn.cos() * real - turn.sin() * imaginary).sum(-3)
        scores, mixing = attend(real.sum(-3), rotated, spec)
        yield scores
        mixing = mixing[..., None, None, :, :]
        gram = mixing @ gram @ mixing.mT
