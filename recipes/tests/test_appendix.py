"""Differences between neighbouring positions of appendix A of the paper, its errata corrected."""

import math

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses import theory as paper
from nope_probe.analyses.theory import theory_scores
from nope_probe.stages import ParameterFreeSpec

ALPHAS = torch.tensor([0.0, 0.05, 0.2, 0.5, 0.9], dtype=torch.float64)


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


def g_difference(alpha: Alphas, i: Positions) -> PerPosition:
    """Return g(i+1) - g(i), which is negative: later queries score every key lower."""
    a, e_a, i = broadcast(alpha, i)
    return 2 * (a - 1) * e_a**2 / denominators(e_a, i)


def h_squared_difference(alpha: Alphas, j: Positions) -> PerPosition:
    """Return h(j+1)^2 - h(j)^2, which is negative: hence the scores of L1 increase in j.

    A.1, with the coefficient of j and the constant corrected (docs/errata.md).
    """
    a, e_a, j = broadcast(alpha, j)
    e = math.e
    quadratic = (a - 1) * e_a**3 * (e_a + 2 * e)
    linear = (a - 1) * e_a**2 * (6 * e**2 - 2 * e * e_a - e_a**2)
    constant = 4 * (a - 1) * e**2 * e_a * (e - e_a)
    return (quadratic * j**2 + linear * j + constant) / denominators(e_a, j) ** 2


def g_no_residual_difference(alpha: Alphas, i: Positions) -> PerPosition:
    """Return g'(i+1) - g'(i), which is negative."""
    a, e_a, i = broadcast(alpha, i)
    return (a - 1) * e_a**2 / denominators(e_a, i)


def h_squared_no_residual_difference(alpha: Alphas, i: Positions) -> PerPosition:
    """Return h'(i+1)^2 - h'(i)^2, which is negative (A.2, with one sign corrected)."""
    a, e_a, i = broadcast(alpha, i)
    e = math.e
    numerator = 2 * e**3 + 2 * e**2 * e_a * (i - 1) + e_a**3 * i * (i - 1)
    return (a - 1) * e_a * numerator / denominators(e_a, i) ** 2


def denominators(e_a: Tensor, i: Tensor) -> Tensor:
    return (math.e + (i - 1) * e_a) * (math.e + i * e_a)


PAIRS = [
    (paper.g, g_difference),
    (paper.h_squared, h_squared_difference),
    (g_no_residual, g_no_residual_difference),
    (h_squared_no_residual, h_squared_no_residual_difference),
]


@pytest.mark.parametrize(("function", "difference"), PAIRS)
def test_a_corrected_difference_formula_is_the_direct_difference(function, difference):
    i = torch.arange(1, 101)
    direct = function(ALPHAS, i + 1) - function(ALPHAS, i)
    assert torch.allclose(difference(ALPHAS, i), direct, atol=1e-12, rtol=0)
    assert (difference(ALPHAS, i) < 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_g_and_h_are_entries_of_the_gram_matrix_after_the_first_layer(alpha):
    n = 5
    gram = torch.full((n, n), alpha, dtype=torch.float64).fill_diagonal_(1)
    a, i = torch.tensor([alpha], dtype=torch.float64), torch.arange(1, n + 1)
    for residual, g, h in [
        (1.0, paper.g, paper.h_squared),
        (0.0, g_no_residual, h_squared_no_residual),
    ]:
        mixing = gram.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
        out = (
            (mixing + residual * torch.eye(n)) @ gram @ (mixing + residual * torch.eye(n)).T
        ).tolist()
        assert g(a, i)[0, 4].item() == pytest.approx(out[4][1], abs=1e-12)
        assert g(a, i)[0, 4].item() == pytest.approx(out[4][3], abs=1e-12)
        assert h(a, i)[0].tolist() == pytest.approx([out[k][k] for k in range(n)], abs=1e-12)


def test_layernorm_over_d_tends_to_one_second_layer_as_the_dimension_grows():
    # The residual is 1/sqrt(d) of the attention output, so it vanishes: eq. (4) without residual.
    spec = ParameterFreeSpec(d_model=10**6, norm="layernorm-d")
    alpha, i = torch.tensor([0.2], dtype=torch.float64), torch.tensor([4, 7])
    g, h = g_no_residual(alpha, i)[0], h_squared_no_residual(alpha, i)[0].sqrt()
    second = theory_scores(alpha, 7, 2, spec)[0, 1]
    assert second[6, 3].item() == pytest.approx((g[1] / (h[0] * h[1])).item(), abs=1e-2)
