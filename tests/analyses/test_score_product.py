"""Scale and soft cap recovered from scores that are computed by hand."""

import pytest
import torch

from nope_probe.analyses.score_product import fit_score_product

PRODUCTS = torch.linspace(-90, 110, 211, dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.3, -0.2, 5.0])
def test_a_multiple_of_the_product_has_its_factor_and_no_cap(scale: float):
    fit = fit_score_product(PRODUCTS, scale * PRODUCTS)
    assert fit.scale == pytest.approx(scale)
    assert fit.soft_cap is None
    assert fit.error < 1e-12


@pytest.mark.parametrize("cap", [7.0, 50.0])
def test_a_soft_cap_and_the_scale_inside_it_are_recovered(cap: float):
    fit = fit_score_product(PRODUCTS, cap * torch.tanh(0.3 * PRODUCTS / cap))
    assert fit.scale == pytest.approx(0.3, rel=1e-6)
    assert fit.soft_cap == pytest.approx(cap, rel=1e-6)


def test_scores_that_are_something_else_are_off():
    bias = torch.linspace(0, 9, 211, dtype=torch.float64).flip(0)
    assert fit_score_product(PRODUCTS, 0.3 * PRODUCTS + bias).error > 0.05
