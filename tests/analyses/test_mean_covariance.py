"""Mean and covariance terms on data whose terms are known."""

import pytest
import torch

from nope_probe.analyses.jackknife import UNDEFINED
from nope_probe.analyses.mean_covariance import participation_ratio, split_mean_covariance

N, FOLDS = 17, 8


def test_terms_of_a_pattern_that_is_all_mean_are_one_and_zero():
    ramp = torch.arange(N).double().repeat(FOLDS, 1, N, 1)
    [terms] = split_mean_covariance(ramp, ramp, torch.randn(FOLDS, 1, N, 5))
    assert terms.mean.value == pytest.approx(1)
    assert terms.covariance.value == pytest.approx(0)
    assert terms.covariance_rms.value == pytest.approx(0)


def test_shares_of_terms_are_projections_on_the_whole_pattern_and_add_to_one():
    torch.manual_seed(0)
    ramp = torch.arange(N).double().repeat(FOLDS, 1, N, 1)
    noisy = ramp + 0.1 * torch.randn(ramp.shape).double()
    [terms] = split_mean_covariance(noisy, 0.25 * ramp, torch.randn(FOLDS, 1, N, 5))
    assert terms.mean.value == pytest.approx(0.25, abs=0.01)
    assert terms.mean.value + terms.covariance.value == pytest.approx(1)
    assert terms.mean_rms.value == pytest.approx(terms.covariance_rms.value / 3, rel=0.05)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_means_spread_evenly_over_k_dimensions_have_ratio_k(dimensions: int):
    basis = torch.linalg.qr(torch.randn(7, dimensions, dtype=torch.float64)).Q
    weights = torch.linalg.qr(torch.randn(N, dimensions + 1, dtype=torch.float64))
    centred = weights.Q - weights.Q.mean(0)
    coordinates = torch.linalg.qr(centred).Q[:, :dimensions]
    means = (coordinates @ basis.T).repeat(FOLDS, 1, 1)
    ratio = participation_ratio(means)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((dimensions,) * 3)


def test_the_ratio_is_taken_between_different_folds():
    torch.manual_seed(1)
    line = torch.arange(N).double()[:, None] * torch.randn(1, 31).double()
    noisy = line + 12 * torch.randn(FOLDS, N, 31).double()
    within = noisy.mean(0) - noisy.mean((0, 1))
    naive = within @ within.T
    biased = float(naive.trace() ** 2 / naive.square().sum())
    ratio = participation_ratio(noisy).value
    assert abs(ratio - 1) < abs(biased - 1) / 2


def test_the_ratio_of_positions_with_one_mean_is_undefined():
    torch.manual_seed(2)
    assert participation_ratio(torch.randn(FOLDS, N, 31)) is UNDEFINED
