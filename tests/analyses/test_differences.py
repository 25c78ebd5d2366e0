"""Differences of two models' patterns: paired and unpaired, against hand arithmetic."""

import pytest
import torch
from torch import Tensor

from nope_probe.analyses.differences import (
    independent_difference,
    measure_differences,
    pattern_difference,
)
from nope_probe.analyses.jackknife import Interval, jackknife
from nope_probe.analyses.pattern import measure, row_centred

N, FOLDS = 13, 5


def folds(seed: int, noise: float = 1.0, slope: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = slope * torch.arange(N, dtype=torch.float64)
    return columns + noise * torch.randn(FOLDS, N, N, generator=generator, dtype=torch.float64)


def rms_of(pattern: Tensor) -> float:
    return float(row_centred(pattern).square().nanmean().sqrt())


def test_a_constant_added_to_the_other_models_pattern_is_found_exactly_if_paired() -> None:
    base, added = folds(0), torch.linspace(0, 3, N, dtype=torch.float64).expand(N, N)
    found = pattern_difference(base + added, base, paired=True)
    assert found.value == pytest.approx(rms_of(added))
    assert found.high - found.low < 1e-9


def test_differences_have_the_value_of_the_measures_difference() -> None:
    one, other = folds(1, slope=0.5), folds(2, slope=0.1)
    values = [measure(each[:, None])[0] for each in (one, other)]
    for paired in (True, False):
        found = measure_differences(one, other, paired=paired)
        for name in ("amplitude", "locality", "monotonicity", "relative_r2", "edge_contrast"):
            expected = getattr(values[0], name).value - getattr(values[1], name).value
            assert found[name].value == pytest.approx(expected), name


def test_noise_that_both_models_share_cancels_only_if_paired() -> None:
    shared = folds(3)
    one, other = shared + 0.1 * folds(4, slope=3.0), shared + 0.1 * folds(5)
    paired, unpaired = (pattern_difference(one, other, paired=each) for each in (True, False))
    assert paired.value == pytest.approx(rms_of(folds(0, noise=0.0, slope=0.3)), rel=0.2)
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 3


def test_an_unpaired_square_takes_no_product_within_a_model_s_fold() -> None:
    one, other = folds(6), folds(7)
    x, y = (row_centred(each)[:, torch.ones(N, N).tril(-1).bool()] for each in (one, other))
    pairs = [(a, b) for a in range(FOLDS) for b in range(FOLDS) if a != b]
    square = sum((x[a] * x[b] + y[a] * y[b]).mean() for a, b in pairs) / len(pairs)
    square = float(square - 2 * (x.mean(0) * y.mean(0)).mean())
    found = pattern_difference(one, other, paired=False)
    assert found.value * abs(found.value) == pytest.approx(square)


def without(fold: int | None) -> list[int]:
    return [each for each in range(FOLDS) if each != fold]


@pytest.mark.parametrize("counts", [[1] * FOLDS, [2, 3, 5, 7, 11]], ids=["even", "uneven"])
def test_the_arms_of_an_unpaired_square_are_those_of_the_jackknife_over_each_models_folds(
    counts: list[int],
) -> None:
    sizes = torch.tensor(counts)
    cells = torch.ones(N, N).tril(-1).bool()
    one, other = folds(6, slope=2.0), folds(7)
    x, y = (row_centred(each)[:, cells] for each in (one, other))

    def mean(maps: Tensor, kept: list[int]) -> Tensor:
        return sum(counts[f] * maps[f] for f in kept) / sum(counts[f] for f in kept)

    def square(maps: Tensor, kept: list[int]) -> float:
        pairs = [(a, b) for a in kept for b in kept if a != b]
        total = sum(counts[a] * counts[b] * float((maps[a] * maps[b]).mean()) for a, b in pairs)
        return total / sum(counts[a] * counts[b] for a, b in pairs)

    half = 0.0
    for maps, constant in ((x, mean(y, without(None))), (y, mean(x, without(None)))):
        estimates = [
            square(maps, kept) - 2 * float((mean(maps, kept) * constant).mean())
            for kept in (without(None), *map(without, range(FOLDS)))
        ]
        interval = jackknife(torch.tensor(estimates, dtype=torch.float64), sizes)
        half += (interval.high - interval.value) ** 2
    found = pattern_difference(one, other, paired=False, counts=(sizes, sizes))
    low, value, high = (each * abs(each) for each in (found.low, found.value, found.high))
    assert high - value == pytest.approx(half**0.5)
    assert value - low == pytest.approx(half**0.5)


def test_arms_of_independent_estimates_add_in_squares_on_each_side() -> None:
    one, other = Interval(value=5.0, low=2.0, high=17.0), Interval(value=1.0, low=-4.0, high=5.0)
    assert independent_difference(one, other) == Interval(value=4.0, low=-1.0, high=17.0)
    one, other = Interval(value=1.0, low=1.0, high=4.0), Interval(value=0.0, low=-4.0, high=0.0)
    assert independent_difference(one, other) == Interval(value=1.0, low=1.0, high=6.0)


def test_a_relative_share_without_a_pattern_has_no_difference() -> None:
    found = measure_differences(folds(8, slope=1.0), folds(9), paired=True)
    assert found["relative_r2"].value != found["relative_r2"].value
    assert found["locality"].low > 0
