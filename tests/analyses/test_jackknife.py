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
    rms_ratio,
    share,
    signed_root,
    standard_error,
)


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


COUNTS = torch.tensor([3, 11, 2, 7, 5])


def from_sequences(values: torch.Tensor) -> torch.Tensor:
    """Return the fold means of sequences, of which fold f has COUNTS[f]."""
    return torch.stack([part.mean(0) for part in values.split(COUNTS.tolist())])


def test_the_variance_of_a_mean_over_unequal_folds_is_that_of_the_delete_m_jackknife():
    """By the pseudo-values of Busing, Meijer and van der Leeden (1999)."""
    torch.manual_seed(7)
    values = torch.randn(int(COUNTS.sum()), 3).double()
    means = leave_one_out(from_sequences(values), COUNTS)
    h, g = COUNTS.sum() / COUNTS.double(), len(COUNTS)
    pseudo = h[:, None] * means[0] - (h[:, None] - 1) * means[1:]
    estimate = g * means[0] - ((1 - 1 / h)[:, None] * means[1:]).sum(0)
    variance = ((pseudo - estimate).square() / (h[:, None] - 1)).mean(0)
    torch.testing.assert_close(standard_error(from_sequences(values), COUNTS), variance.sqrt())
    freedom = float(COUNTS.sum() ** 2 / COUNTS.square().sum()) - 1
    low, high = stats.t.interval(0.95, df=freedom, loc=means[0, 0], scale=variance[0].sqrt())
    interval = jackknife(means[:, 0], COUNTS)
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_intervals_of_unequal_folds_cover_the_truth_19_times_of_20():
    torch.manual_seed(9)
    signal, n, covered = torch.sin(torch.arange(61)).double(), 400, 0
    truth = float(signal.square().mean()) ** 0.5
    counts = torch.tensor([9, 3, 3, 3, 3, 2, 2, 1])
    noise = counts.double().rsqrt()[:, None]
    for _ in range(n):
        folds = signal + noise * torch.randn(8, 61).double()
        interval = rms(cross_products(folds[None], folds[None], counts)[:, 0, 0], counts)
        covered += interval.low <= truth <= interval.high
    assert 0.91 <= covered / n <= 0.985


def test_a_ratio_of_rms_has_the_interval_of_its_logarithm():
    torch.manual_seed(10)
    signal = torch.sin(torch.arange(211)).double()
    folds = signal + 0.1 * torch.randn(8, 211).double()
    whole = cross_products(3 * folds[None], 3 * folds[None])[:, 0, 0]
    part = cross_products(folds[None], folds[None])[:, 0, 0]
    assert rms_ratio(whole, part).value == pytest.approx(3)
    other = signal + 0.1 * torch.randn(8, 211).double()
    ratio = rms_ratio(whole, cross_products(other[None], other[None])[:, 0, 0])
    assert ratio.low < 3 < ratio.high
    assert ratio.value**2 == pytest.approx(ratio.low * ratio.high)
    noise = torch.randn(8, 211).double()
    assert rms_ratio(whole, cross_products(noise[None], noise[None])[:, 0, 0]) is UNDEFINED
