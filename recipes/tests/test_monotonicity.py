"""Whether a map increases in j, on maps whose steps are known."""

import math
from dataclasses import replace

import pytest
import torch

from monotonicity import (
    by_distance,
    mean_steps,
    monotonicity_tests,
    steps_in_j,
)
from nope_probe.analyses.simulation import Estimate

N = 11


def estimate(mean, noise=0.0, folds=32):
    generator = torch.Generator().manual_seed(0)
    item = mean.double() + noise * torch.randn(folds, 1, N, N, generator=generator).double()
    masked = item.masked_fill(torch.ones(N, N).triu(1).bool(), torch.nan)
    return Estimate(folds=masked, counts=torch.full((folds,), 5))


def ramp(slope=1e-3):
    return slope * torch.arange(N).double().expand(1, N, N).clone()


def test_a_step_by_distance_is_the_mean_over_queries_and_leaves_out_the_diagonal():
    lag = (torch.arange(N)[:, None] - torch.arange(N)).double()
    maps = torch.where(lag == 0, 100.0, -(lag**2))[None]  # a step from lag g to g - 1 is 2g - 1
    expected = torch.tensor([2.0 * g - 1 for g in range(2, N)]).double()
    assert torch.equal(by_distance(steps_in_j(maps))[0], expected)
    assert torch.equal(mean_steps(estimate(maps), 1e-9).mean[0], expected)


@pytest.mark.parametrize(
    ("slope", "noise", "verdict", "rises", "falls"),
    [
        (1e-3, 1e-4, "increasing", N - 2, 0),
        (-1e-3, 1e-4, "not increasing", 0, N - 2),
        (1e-8, 0.0, "flat", 0, 0),  # below what float32 resolves
        (0.0, 1e-4, "flat", 0, 0),
    ],
)
def test_a_ramp_above_its_noise_and_rounding_rises_or_falls_at_every_distance(
    slope: float, noise: float, verdict: str, rises: int, falls: int
):
    (test,) = monotonicity_tests(estimate(ramp(slope), noise), ramp(slope), 1e-7)
    assert (test.verdict, test.rises, test.falls) == (verdict, rises, falls)
    assert test.distances == N - 2
    if not slope:
        assert test.falling_cells == 0
    (few,) = monotonicity_tests(estimate(ramp(slope), noise, folds=3), ramp(slope), 1e-7)
    assert few.monotonicity.value != few.monotonicity.value, "no interval of three blocks"


def test_the_share_of_pairs_8_apart_is_undefined_where_no_keys_are_8_apart():
    whole, short = estimate(ramp(), 1e-4), slice(0, 5)
    (test,) = monotonicity_tests(
        replace(whole, folds=whole.folds[..., short, short]), ramp()[..., short, short], 1e-7
    )
    assert math.isnan(test.monotonicity.value)


def test_a_small_fall_is_found_where_theory_predicts_it_though_no_distance_falls():
    dip = torch.zeros(1, N, N).double()
    dip[0, -1, 5:10] = -1.5e-3 * torch.arange(1, 6)  # the last query falls, five steps of 0.5e-3
    mean = ramp() + dip
    (test,) = monotonicity_tests(estimate(mean, 1e-4), mean, 1e-7)
    assert (test.falls, test.falling_cells) == (0, 5)
    assert test.theory_fall == pytest.approx(-0.5e-3)
    assert test.fall.low < -0.5e-3 < test.fall.high < 0
    assert test.verdict == "not increasing"
