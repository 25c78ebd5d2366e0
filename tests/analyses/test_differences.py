"""Differences of numbers and patterns of two models: t tests by scipy, Holm's rule by hand, RMS."""

import math
from dataclasses import replace
from math import isnan
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import ttest_ind, ttest_rel
from torch import Tensor

from nope_probe import AttentionSplit
from nope_probe.analyses.differences import LEVEL, Numbers, compare_numbers, holm
from nope_probe.analyses.jackknife import UNDEFINED, Interval, jackknife, rms, rms_difference
from nope_probe.maps.estimates import Estimates
from nope_probe.studies.compare import PARTS


class Difference(NamedTuple):
    """The difference of two numbers, its test, and whether it was paired."""

    interval: Interval
    p: float
    method: str | None


def as_numbers(interval: Interval) -> Numbers:
    """Return an interval as an array of one number, which has 17 folds of weight 0 if none."""
    replicates, weights = np.full((1, 18), np.nan), np.zeros((1, 17))
    if interval.replicates is not None:
        replicates = interval.replicates.values.double().numpy()[None]
        weights = interval.replicates.weights.double().numpy()[None]
    return Numbers(ends=np.array([interval.ends]), replicates=replicates, weights=weights)


def compare(base: Interval, other: Interval, *, paired: bool, is_rms: bool = False) -> Difference:
    """Return `other` less `base`."""
    sides = map(as_numbers, (base, other))
    [row] = compare_numbers(*sides, paired=paired, is_rms=np.array([is_rms])).to_dict("records")
    value, low, high = (row[f"difference{end}"] for end in ("", "_low", "_high"))
    return Difference(Interval(value=value, low=low, high=high), row["p"], row["method"])


N_FOLDS = 17


def noise(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_FOLDS, generator=generator, dtype=torch.float64)


def mean(folds: Tensor) -> Interval:
    return jackknife(Estimates.of_means(folds))


def of(base: Tensor, other: Tensor, *, paired: bool = True) -> Difference:
    return compare(mean(base), mean(other), paired=paired)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_difference_of_a_mean_is_tested_as_scipy_tests_it(paired: bool, seed: int) -> None:
    x, y = noise(seed), noise(seed) * 0.3 + noise(seed + 10) + 0.7
    test = ttest_rel(y, x) if paired else ttest_ind(y, x, equal_var=False)
    low, high = test.confidence_interval(0.95)
    found = of(x, y, paired=paired)
    assert found.interval.ends == pytest.approx((float((y - x).mean()), low, high))
    assert found.p == pytest.approx(test.pvalue)
    assert found.method == ("paired" if paired else "unpaired")


def test_an_rms_is_paired_on_its_squares_or_has_the_arms_of_both_intervals() -> None:
    x, y = (Estimates.of_means(noise(seed).abs() + seed) for seed in (0, 1))
    found = compare(rms(x), rms(y), paired=True, is_rms=True)
    expected = rms_difference(y, x)
    assert found.interval.ends == pytest.approx(expected.ends)
    test = ttest_rel(noise(1).abs() + 1, noise(0).abs())
    assert found.p == pytest.approx(test.pvalue)
    found, (less, more) = compare(rms(x), rms(y), paired=False, is_rms=True), (rms(x), rms(y))
    value = more.value - less.value
    down = math.hypot(more.value - more.low, less.high - less.value)
    up = math.hypot(more.high - more.value, less.value - less.low)
    assert found.interval.ends == pytest.approx((value, value - down, value + up))


def test_equal_numbers_have_no_difference_and_no_doubt() -> None:
    assert of(noise(0), noise(0)).interval.ends == (0, 0, 0)
    assert of(noise(0), noise(0)).p == 1


def test_differences_of_rounding_are_none_and_those_of_every_fold_alike_are_certain() -> None:
    assert of(noise(0), noise(0) + 5e-7).p == 1
    assert of(noise(0), noise(0) + 0.5).p < 1e-9


def test_what_has_no_number_or_no_folds_is_not_tested() -> None:
    undefined = compare(UNDEFINED, mean(noise(0)), paired=True)
    assert isnan(undefined.interval.value)
    bare = replace(mean(noise(0)), replicates=None)
    without = compare(bare, mean(noise(1)), paired=True)
    assert without.interval.value == pytest.approx(float((noise(1) - noise(0)).mean()))
    assert isnan(without.interval.low)
    assert isnan(without.p)


def head(folds: Tensor, others_gap: float) -> AttentionSplit:
    """Return a head whose every number is a mean over sequences, with a gap of its bounds."""
    mean = Estimates.of_means(folds)
    values = mean.values.expand(len(PARTS) + 2, -1)  # with the first weight and what is missed
    return AttentionSplit.of(
        values, mean.weights, torch.tensor([0.0, others_gap], dtype=torch.float64)
    )


def test_unlike_gaps_of_bounds_widen_the_change_of_their_parts_toward_more_content() -> None:
    base, wide, gap = head(noise(0), 0.1), head(noise(0), 0.9), (0.9 - 0.1) / 8
    ends = {"others_position": (0, -gap, 0), "others_content": (0, 0, gap)}
    for part in PARTS:
        of_heads = [getattr(of_head, part) for of_head in (base, wide)]
        found = compare(*of_heads, paired=True)
        assert found.interval.ends == pytest.approx(ends.get(part, (0, 0, 0)), abs=1e-12)
        assert found.p == 1


def test_a_change_within_the_gaps_is_none() -> None:
    less = noise(0) - 0.05  # position among the other keys: by less than an eighth of the gap
    for gaps, differs in (((0.0, 0.0), True), ((0.0, 0.8), True), ((0.8, 0.0), False)):
        heads = [head(folds, gap) for folds, gap in zip((noise(0), less), gaps, strict=True)]
        found = compare(*(h.others_position for h in heads), paired=True)
        assert (found.p <= LEVEL) is differs


def test_holms_rule_multiplies_by_the_tests_left_and_never_falls() -> None:
    adjusted = holm(pd.Series([0.04, 0.001, float("nan"), 0.02, 0.03])).tolist()
    # Ordered: 0.001 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1, none below an earlier product.
    assert adjusted[:2] == pytest.approx([0.06, 0.004])
    assert isnan(adjusted[2])
    assert adjusted[3:] == pytest.approx([0.06, 0.06])
