"""Cross-fold products and jackknife intervals against their definitions."""

import pytest
import torch
from scipy import stats

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    cross_products,
    jackknife,
    leave_one_out,
    rms,
    share,
    signed_root,
)


def by_definition(x: torch.Tensor, y: torch.Tensor, folds: list[int]) -> float:
    pairs = [(a, b) for a in folds for b in folds if a != b]
    return sum(float((x[a] * y[b]).mean()) for a, b in pairs) / len(pairs)


def test_cross_products_are_the_mean_over_pairs_of_different_folds():
    torch.manual_seed(0)
    x, y = torch.randn(3, 7, 11).double(), torch.randn(2, 7, 11).double()
    products = cross_products(x, y)
    for one in range(3):
        for other in range(2):
            truth = by_definition(x[one], y[other], list(range(7)))
            assert float(products[0, one, other]) == pytest.approx(truth, abs=1e-12)


def test_delete_one_products_leave_exactly_one_fold_out():
    torch.manual_seed(1)
    x, y = torch.randn(2, 5, 13).double(), torch.randn(3, 5, 13).double()
    products = cross_products(x, y)
    for left_out in range(5):
        others = [fold for fold in range(5) if fold != left_out]
        truth = by_definition(x[1], y[2], others)
        assert float(products[1 + left_out, 1, 2]) == pytest.approx(truth, abs=1e-12)


def test_noise_does_not_count_as_pattern():
    torch.manual_seed(2)
    signal = torch.linspace(-1, 1, 101).double()
    estimates = []
    for _ in range(300):
        folds = signal + 2 * torch.randn(8, 101).double()
        estimates.append(float(cross_products(folds[None], folds[None])[0, 0, 0]))
    truth = float(signal.square().mean())
    error = torch.tensor(estimates).std() / 300**0.5
    assert abs(sum(estimates) / 300 - truth) < 4 * error
    naive = float((signal + 2 * torch.randn(8, 101).double().mean(0)).square().mean())
    assert naive - truth > 20 * error


def test_the_jackknife_of_a_mean_is_the_t_interval():
    values = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0], dtype=torch.float64)
    interval = jackknife(leave_one_out(values))
    low, high = stats.t.interval(0.95, df=4, loc=values.mean(), scale=float(values.std()) / 5**0.5)
    assert interval.value == pytest.approx(5.6)
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_the_interval_of_an_amplitude_covers_the_truth_19_times_of_20():
    torch.manual_seed(3)
    signal = torch.sin(torch.arange(211)).double()
    truth, covered, n = float(signal.square().mean()) ** 0.5, 0, 400
    for _ in range(n):
        folds = signal + torch.randn(8, 211).double()
        interval = rms(cross_products(folds[None], folds[None])[:, 0, 0])
        covered += interval.low <= truth <= interval.high
    assert 0.91 <= covered / n <= 0.985


def test_a_share_of_what_may_be_zero_is_undefined():
    part = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    noise = torch.tensor([0.1, -0.5, 0.6, -0.4, 0.7])
    assert share(part, noise) is UNDEFINED
    assert share(part, part * 2) == Interval(value=0.5, low=0.5, high=0.5)


def test_the_signed_root_keeps_the_sign():
    assert (signed_root(4.0), signed_root(-9.0), signed_root(0.0)) == (2.0, -3.0, 0.0)


def test_an_interval_excludes_zero_only_if_both_ends_lie_on_one_side():
    assert Interval(value=1.0, low=0.5, high=2.0).excludes_zero
    assert Interval(value=-1.0, low=-2.0, high=-0.5).excludes_zero
    assert not Interval(value=1.0, low=-0.5, high=2.0).excludes_zero


@pytest.mark.parametrize("n_folds", [2, 3])
def test_fewer_than_four_folds_give_no_interval(n_folds: int):
    with pytest.raises(ValueError, match=f"at least 4 folds, got {n_folds}"):
        jackknife(torch.ones(1 + n_folds))


def test_two_folds_cannot_be_left_out_of():
    with pytest.raises(ValueError, match="at least 3 folds"):
        cross_products(torch.ones(1, 2, 5), torch.ones(1, 2, 5))
