"""The paper's appendix A with its errata corrected: h' and g' without residual, and differences.

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
    a, e_a, i = _broadcast(alpha, i)
    return (math.e * a + e_a * (1 + a * (i - 2))) / (math.e + (i - 1) * e_a)


def h_squared_no_residual(alpha: Alphas, i: Positions) -> PerPosition:
    """Return h'^2, the h^2 of a layer without its residual connection (A.2)."""
    a, e_a, i = _broadcast(alpha, i)
    others = (i - 1) * (1 + a * (i - 2))
    squares = math.e**2 + 2 * math.e * e_a * a * (i - 1) + e_a**2 * others
    return squares / (math.e + (i - 1) * e_a) ** 2


def g_difference(alpha: Alphas, i: Positions) -> PerPosition:
    """Return g(i+1) - g(i), which is negative: later queries score every key lower."""
    a, e_a, i = _broadcast(alpha, i)
    return 2 * (a - 1) * e_a**2 / _denominators(e_a, i)


def h_squared_difference(alpha: Alphas, j: Positions) -> PerPosition:
    """Return h(j+1)^2 - h(j)^2, which is negative: hence the scores of L1 increase in j.

    A.1, with the coefficient of j and the constant corrected (docs/errata.md).
    """
    a, e_a, j = _broadcast(alpha, j)
    e = math.e
    quadratic = (a - 1) * e_a**3 * (e_a + 2 * e)
    linear = (a - 1) * e_a**2 * (6 * e**2 - 2 * e * e_a - e_a**2)
    constant = 4 * (a - 1) * e**2 * e_a * (e - e_a)
    return (quadratic * j**2 + linear * j + constant) / _denominators(e_a, j) ** 2


def g_no_residual_difference(alpha: Alphas, i: Positions) -> PerPosition:
    """Return g'(i+1) - g'(i), which is negative."""
    a, e_a, i = _broadcast(alpha, i)
    return (a - 1) * e_a**2 / _denominators(e_a, i)


def h_squared_no_residual_difference(alpha: Alphas, i: Positions) -> PerPosition:
    """Return h'(i+1)^2 - h'(i)^2, which is negative (A.2, with one sign corrected)."""
    a, e_a, i = _broadcast(alpha, i)
    e = math.e
    numerator = 2 * e**3 + 2 * e**2 * e_a * (i - 1) + e_a**3 * i * (i - 1)
    return (a - 1) * e_a * numerator / _denominators(e_a, i) ** 2


def _denominators(e_a: Tensor, i: Tensor) -> Tensor:
    return (math.e + (i - 1) * e_a) * (math.e + i * e_a)


def _broadcast(alpha: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
