"""Differences between neighbouring positions of appendix A of the paper, its errata corrected."""

import math

import pytest
import torch
from support import appendix
from support.appendix import Alphas, PerPosition, Positions, broadcast
from torch import Tensor

from nope_probe.analyses.parameter_free import theory as paper

ALPHAS = torch.tensor([0.0, 0.05, 0.2, 0.5, 0.9], dtype=torch.float64)


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
    (appendix.g_no_residual, g_no_residual_difference),
    (appendix.h_squared_no_residual, h_squared_no_residual_difference),
]


@pytest.mark.parametrize(("function", "difference"), PAIRS)
def test_a_corrected_difference_formula_is_the_direct_difference(function, difference):
    i = torch.arange(1, 101)
    direct = function(ALPHAS, i + 1) - function(ALPHAS, i)
    assert torch.allclose(difference(ALPHAS, i), direct, atol=1e-12, rtol=0)
    assert (difference(ALPHAS, i) < 0).all()
