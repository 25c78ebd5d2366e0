"""Cross-fold products and jackknife intervals against their definitions."""

import pytest
import torch
from scipy import stats
from support.dense_patterns import estimates as estimates_of
from support.dense_patterns import fold_products

from nope_probe import measure
from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    along,
    jackknife,
    rms,
    rms_difference,
    share,
    standard_error,
)
from nope_probe.maps.estimates import (
    Estimates,
    cross_products,
    fold_gram,
    fold_weights,
    leave_one_out,
)


@pytest.mark.parametrize("roots", [(1.0, 0.0), (1.0, 0.7)])
def test_a_paired_difference_of_rms_covers_the_truth_near_zero_too(
    roots: tuple[float, float],
) -> None:
    generator = torch.Generator().manual_seed(13)
    signal = torch.sin(torch.arange(31)).double()
    signal /= signal.square().mean().sqrt()
    sizes, n, covered = torch.tensor([9, 3, 3, 3, 3, 2, 2, 1]), 400, 0
    for _ in range(n):
        shared, own = torch.randn(2, 8, 31, generator=generator, dtype=torch.float64)
        noises = (shared, 0.9 * shared + 0.19**0.5 * own)
        squares = []
        for root, noise in zip(roots, noises, strict=True):
            folds = root * signal + noise / sizes[:, None].sqrt()
            products = fold_products(folds[None], folds[None], fold_weights(8, sizes))[:, 0, 0]
            squares.append(estimates_of(products, sizes))
        interval = rms_difference(*squares)
        assert interval.low <= interval.value <= interval.high
        covered += interval.low <= roots[0] - roots[1] <= interval.high
    assert 0.93 <= covered / n <= 0.99


def test_a_paired_difference_of_rms_is_exact_where_it_does_not_vary() -> None:
    square = estimates_of(torch.tensor([4.0, 3.0, 5.0, 4.5, 3.5, -1.0]).double())
    zero = Interval(value=0.0, low=0.0, high=0.0)
    assert rms_difference(square, square) == zero
    assert rms_difference(0.0 * square, 0.0 * square) == zero
    quarter = torch.full((6,), 0.25).double()
    alone, less = rms(square), rms_difference(square, square.with_values(quarter))
    assert (less.value, less.high) == pytest.approx((alone.value - 0.5, alone.high - 0.5))
    assert alone.low < 0
    assert less.low == pytest.approx(-0.5), "an RMS is not negative"


def test_where_the_second_rms_may_be_zero_all_of_the_first_may_be_the_difference() -> None:
    one = estimates_of(torch.tensor([4.0, 3.9, 4.1, 4.05, 3.95, 4.0]).double())
    nothing = estimates_of(torch.tensor([0.0, 0.05, -0.05, -0.02, 0.02, 0.0]).double())
    alone, less = rms(one), rms_difference(one, nothing)
    assert less.high == pytest.approx(alone.high, rel=1e-4)
    assert less.low < alone.low


def test_a_paired_difference_of_rms_far_from_zero_is_the_roots_jackknife() -> None:
    generator = torch.Generator().manual_seed(7)
    one, other = 9 + 0.01 * torch.randn(2, 9, generator=generator).double()
    expected = jackknife(estimates_of(one.sqrt() - other.sqrt()))
    result = rms_difference(estimates_of(one), estimates_of(other))
    ends = (result.value, result.low, result.high)
    assert ends == pytest.approx((expected.value, expected.low, expected.high), rel=1e-2)


def test_a_share_of_what_may_be_zero_is_undefined():
    part = estimates_of(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]))
    noise = estimates_of(torch.tensor([0.1, -0.5, 0.6, -0.4, 0.7]))
    assert share(part, noise) is UNDEFINED
    assert share(part, part * 2.0) == Interval(value=0.5, low=0.5, high=0.5)


def test_too_few_folds_give_no_interval():
    with pytest.raises(ValueError, match="at least 4 folds, got 3"):
        jackknife(estimates_of(torch.ones(4)))
    for n_folds in (1, 2, 3):
        with pytest.raises(ValueError, match=f"at least 4 folds, got {n_folds}"):
            measure(torch.randn(n_folds, 1, 7, 7))


COUNTS = torch.tensor([3, 11, 2, 7, 5])
WEIGHTS = fold_weights(len(COUNTS), COUNTS)


def from_sequences(values: torch.Tensor) -> torch.Tensor:
    """Return the fold means of sequences, of which fold f has COUNTS[f]."""
    return torch.stack([part.mean(0) for part in values.split(COUNTS.tolist())])


def test_the_variance_of_a_mean_over_unequal_folds_is_that_of_the_delete_m_jackknife():
    """By the pseudo-values of Busing, Meijer and van der Leeden (1999)."""
    torch.manual_seed(7)
    values = torch.randn(int(COUNTS.sum()), 3).double()
    means = leave_one_out(from_sequences(values), WEIGHTS)
    h, g = COUNTS.sum() / COUNTS.double(), len(COUNTS)
    pseudo = h[:, None] * means[0] - (h[:, None] - 1) * means[1:]
    estimate = g * means[0] - ((1 - 1 / h)[:, None] * means[1:]).sum(0)
    variance = ((pseudo - estimate).square() / (h[:, None] - 1)).mean(0)
    torch.testing.assert_close(standard_error(from_sequences(values), WEIGHTS), variance.sqrt())
    freedom = float(COUNTS.sum() ** 2 / COUNTS.square().sum()) - 1
    low, high = stats.t.interval(0.95, df=freedom, loc=means[0, 0], scale=variance[0].sqrt())
    interval = jackknife(estimates_of(means[:, 0], COUNTS))
    assert (interval.low, interval.high) == pytest.approx((low, high))


def square_of(folds: torch.Tensor) -> Estimates:
    return estimates_of(fold_products(folds[None], folds[None])[:, 0, 0])


def test_nats_along_a_pattern_are_of_its_unit_and_none_along_noise():
    torch.manual_seed(10)
    signal = torch.sin(torch.arange(211)).double()
    whole = square_of(signal + 0.1 * torch.randn(8, 211).double())
    tripled, root = along(3.0 * whole, whole), signal.square().mean().sqrt()
    assert tripled is not None
    assert float(tripled.values[0]) == pytest.approx(3 * rms(whole).value)
    torch.testing.assert_close(tripled.values, 3 * whole.values.sqrt())
    nats = jackknife(tripled)
    assert nats.low < 3 * root < nats.high
    assert along(whole, square_of(torch.randn(8, 211).double())) is None


def test_products_across_halves_leave_out_folds_as_a_product_of_fewer_folds_does():
    folds, weights = torch.randn(2, 5, 7).double(), fold_weights(5, torch.tensor([2, 3, 5, 7, 11]))

    def across(kept: list[int]) -> torch.Tensor:
        means = [
            (weights[of, None] * folds[:, of]).sum(1) / weights[of].sum()
            for of in ([x for x in kept if x % 2 == half] for half in (0, 1))
        ]
        product = means[0] @ means[1].T / 7
        return (product + product.T) / 2

    products = cross_products(fold_gram(folds), 7, weights, across_halves=True)
    everything = [*range(5)]
    for values, gone in zip(products, [None, *everything], strict=True):
        expected = across([fold for fold in everything if fold != gone])
        torch.testing.assert_close((values + values.T) / 2, expected)
