"""Input without anything to measure gives no number, no warning and no traceback."""

from dataclasses import astuple, fields
from math import isnan

import pytest
import torch
from torch import Tensor

from nope_probe.analyses.attribution import attribute
from nope_probe.analyses.behaviour import position_means
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern import Measures, measure
from nope_probe.analyses.recover import fit_score_product
from nope_probe.analyses.shapley import player_set
from nope_probe.analyses.splits import participation_ratio, split_mean_covariance
from nope_probe.maps.centred import kept_cells, row_centred

FOLDS = 5
CONSTANTS = [0.0, 0.1, -3.3, 1e4 / 3]  # whose row means are off by rounding


def constant_maps(value: float, n: int = 13) -> Tensor:
    return torch.full((FOLDS, 1, n, n), value, dtype=torch.float64)


def is_undefined(interval: Interval) -> bool:
    return all(isnan(each) for each in (interval.value, interval.low, interval.high))


@pytest.mark.parametrize("value", CONSTANTS)
@pytest.mark.parametrize("skip", [0, 1])
def test_equal_scores_have_no_pattern_and_no_trend(value: float, skip: int):
    [found] = measure(constant_maps(value), skip)
    for name in ("amplitude", "non_relative", "edge_contrast_visible"):
        interval = getattr(found, name)
        assert (interval.value, interval.low, interval.high) == (0, 0, 0)
        assert not interval.excludes_zero
    for name in ("locality", "monotonicity", "monotonicity_lag1", "relative_r2"):
        assert is_undefined(getattr(found, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_equal_scores_are_exactly_zero_in_a_pattern(dtype: torch.dtype):
    scores = (torch.arange(1, 24)[:, None] / 7).to(dtype).repeat(1, 23)
    assert row_centred(scores)[kept_cells(23)].eq(0).all()
    assert row_centred(scores, 2)[kept_cells(23, 2)].eq(0).all()


@pytest.mark.parametrize("value", CONSTANTS)
def test_equal_scores_have_no_shares(value: float):
    maps = constant_maps(value)
    conditions = {(): maps, "mask": maps, "w_q": maps, ("mask", "w_q"): maps}
    [layer] = attribute(conditions, [player_set(["mask", "w_q"])], position=None)
    for each in (*layer.sources, layer.position):
        assert is_undefined(each.share), each
    for each in layer.players:
        for part in ("share", "lost", "alone", "amplification"):
            assert is_undefined(getattr(each, part)), (each.player, part)
    assert all(is_undefined(each.share) for each in layer.interactions)


def test_equal_keys_span_no_dimensions_and_equal_scores_no_terms():
    keys = torch.full((FOLDS, 13, 3), 0.7)
    assert is_undefined(participation_ratio(keys.double()))
    maps = constant_maps(0.1)[:, 0], constant_maps(0.3)[:, 0]
    found = split_mean_covariance(0, *maps, keys)
    for each in (found.mean, found.covariance, found.dimensions):
        assert is_undefined(each)


def test_one_map_of_noise_has_no_share():
    generator = torch.Generator().manual_seed(0)
    [found] = measure(torch.randn(FOLDS, 1, 5, 5, generator=generator))
    assert is_undefined(found.relative_r2)
    for name in ("locality", "monotonicity"):  # no row has 8 keys, no key has one 8 before it
        assert is_undefined(getattr(found, name))
    assert len(fields(Measures)) == 8


@pytest.mark.filterwarnings("error")
def test_the_losses_of_one_document_have_a_mean_and_no_interval():
    losses = torch.tensor([[1.0, 2.0, 3.0]])
    found = position_means(losses)
    assert found.value.tolist() == [1, 2, 3]
    assert found.low.isnan().all()
    assert found.high.isnan().all()


@pytest.mark.filterwarnings("error")
def test_products_that_are_all_zero_have_no_scale():
    zeros = torch.zeros(5)
    assert astuple(fit_score_product(zeros, zeros)) == (0.0, None, 0.0)
    assert astuple(fit_score_product(zeros, torch.arange(5.0))) == (0.0, None, 1.0)
