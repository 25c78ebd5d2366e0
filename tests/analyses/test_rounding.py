"""What rounding leaves of equal scores is no pattern, and a little more than that is one."""

from math import isnan

import pytest
import torch
from torch import Tensor

from nope_probe import capture_scores, load
from nope_probe.analyses.attribution import attribute
from nope_probe.analyses.jackknife import Interval, cross_products, rms
from nope_probe.analyses.pattern import measure
from nope_probe.analyses.pattern_changes import (
    kept_patterns,
    mask_effect,
    pattern_lost,
    positional_part,
)
from nope_probe.analyses.pattern_rows import ROUNDING, exceeds_rounding, mean_squares
from nope_probe.analyses.recover import Rotation
from nope_probe.analyses.shapley import player_set
from nope_probe.analyses.splits import make_bands, split_bands, split_mean_covariance
from nope_probe.maps.centred import KeptCells, kept_cells, row_centred

FOLDS, N = 5, 23
RMS = 7.0  # of the scores, nats


def is_undefined(interval: Interval) -> bool:
    return all(isnan(each) for each in (interval.value, interval.low, interval.high))


def is_zero(interval: Interval) -> bool:
    return (interval.value, interval.low, interval.high) == (0, 0, 0)


def ripple(amplitude: float, skip: int = 0) -> Tensor:
    """Return a pattern of this RMS, nats, without a relative part, the same in all folds."""
    key = torch.arange(N, dtype=torch.float64)
    pattern = row_centred((key * 2.3).sin() * key[:, None].cos(), skip)
    cells = kept_cells(N, skip)
    return (pattern / pattern[cells].square().mean().sqrt() * amplitude).nan_to_num()


def maps(*patterns: Tensor) -> Tensor:
    """Return fold maps of one layer: scores of 7 nats and patterns."""
    return (RMS + sum(patterns, torch.zeros(N, N))).repeat(FOLDS, 1, 1, 1)


def test_the_bound_is_eight_times_what_float32_resolves() -> None:
    assert pytest.approx(8 * 2**-23) == ROUNDING
    squares = torch.tensor([(RMS * ROUNDING) ** 2, 9.0])
    assert not exceeds_rounding(squares, RMS**2)
    assert not exceeds_rounding(-squares, RMS**2)
    assert exceeds_rounding(squares * 1.01, RMS**2)


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("size", [1, 5, N])
def test_the_mean_square_is_over_the_kept_cells_however_the_rows_are_cut(
    skip: int, size: int
) -> None:
    folds = torch.randn(FOLDS, N, N, generator=torch.Generator().manual_seed(0)).double()
    cells = kept_cells(N, skip)
    found = torch.zeros(FOLDS, dtype=torch.float64)
    for start in range(0, N, size):
        rows = folds[:, start : start + size, : start + size]
        found += mean_squares(rows, start, KeptCells.of(torch.zeros(N, dtype=torch.long), skip))
    torch.testing.assert_close(found, folds[:, cells].square().mean(1))


@pytest.mark.parametrize("skip", [0, 2])
def test_a_pattern_within_rounding_has_no_amplitude_and_no_trend(skip: int) -> None:
    [found] = measure(maps(ripple(0.9 * RMS * ROUNDING, skip)), skip)
    for name in ("amplitude", "non_relative", "edge_contrast_visible"):
        assert is_zero(getattr(found, name)), name
    for name in ("locality", "monotonicity", "monotonicity_lag1", "relative_r2"):
        assert is_undefined(getattr(found, name)), name


@pytest.mark.parametrize("skip", [0, 2])
def test_a_pattern_beyond_rounding_is_measured(skip: int) -> None:
    amplitude = 1.1 * RMS * ROUNDING
    [found] = measure(maps(ripple(amplitude, skip)), skip)
    assert found.amplitude.value == pytest.approx(amplitude, rel=1e-4)
    assert found.amplitude.excludes_zero
    assert not is_undefined(found.locality)


def test_a_source_that_changes_nothing_but_the_last_digits_has_no_share_and_no_players() -> None:
    rope, digits = ripple(2.5), ripple(0.5 * RMS * ROUNDING)
    intact, without_mask = maps(rope, digits), maps(rope)
    conditions = {(): intact, "mask": without_mask, "w_q": without_mask, ("mask", "w_q"): maps()}
    [layer] = attribute(conditions, [player_set(["mask", "w_q"])], position=None)
    shares = {each.term: each.share.value for each in layer.sources}
    assert shares["content"] == pytest.approx(1, abs=1e-5)
    assert shares["mask"] == pytest.approx(0, abs=1e-5)
    assert is_zero(layer.position.rms)
    for each in layer.players:
        assert is_undefined(each.share)
        assert is_undefined(each.lost)
        assert is_undefined(each.amplification)


def test_nothing_is_left_of_a_pattern_within_rounding() -> None:
    digits = maps(ripple(0.5 * RMS * ROUNDING))
    [kept] = kept_patterns(digits, digits)
    assert is_zero(kept.amplitude)
    assert is_undefined(kept.share)
    assert is_undefined(kept.locality)
    effect = mask_effect(digits[:, 0], maps()[:, 0])
    assert is_zero(effect.with_mask)
    assert is_zero(effect.difference)


def test_a_pattern_that_is_no_number_is_not_taken_for_none() -> None:
    assert exceeds_rounding(torch.tensor([torch.nan]), RMS**2)


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_terms_of_a_pattern_within_rounding_are_none(times: float) -> None:
    amplitude = times * RMS * ROUNDING
    scores = maps(ripple(amplitude))[:, 0]
    found = split_mean_covariance(0, scores, scores / 2, torch.ones(FOLDS, N, 3))
    if times < 1:
        assert is_undefined(found.mean)
        assert is_undefined(found.covariance)
    else:
        assert found.mean.value == pytest.approx(0.5)
        assert found.covariance.value == pytest.approx(0.5)
    assert is_zero(found.mean_rms)  # half of the pattern's
    assert is_zero(found.covariance_rms)


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_mean_keys_that_differ_within_rounding_span_no_dimensions(times: float) -> None:
    means = torch.full((FOLDS, 22, 3), RMS, dtype=torch.float64)
    # Of three coordinates, one differs: by this, the RMS over all is `times` the bound.
    means[..., 1] += times * RMS * ROUNDING * 3**0.5 * torch.tensor([1.0, -1.0]).repeat(11)
    scores = maps(ripple(2.5))[:, 0, :22, :22]
    found = split_mean_covariance(0, scores, scores / 2, means)
    if times < 1:
        assert is_undefined(found.dimensions)
    else:
        assert found.dimensions.value == pytest.approx(1)


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_a_band_within_rounding_has_no_amplitude_and_no_share(times: float) -> None:
    amplitude = times * RMS * ROUNDING
    turning = Rotation(
        pairs=torch.tensor([[0, 2], [1, 3]]), frequencies=torch.tensor([1.0, 0.1]), size=1.0
    )
    bands = make_bands([turning], 4, 2)
    part = maps(ripple(amplitude))
    both = torch.stack([part, maps() - RMS], 2)
    found = split_bands(part, both, bands)
    assert is_zero(found[1].amplitude)
    if times < 1:
        assert is_zero(found[0].amplitude)
        assert is_undefined(found[0].share)
    else:
        assert found[0].amplitude.value == pytest.approx(amplitude, rel=1e-4)
        assert found[0].share.value == pytest.approx(1)


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_a_positional_part_within_rounding_is_none(times: float) -> None:
    amplitude = times * RMS * ROUNDING * 2**0.5  # of two score maps
    part = positional_part(maps(ripple(amplitude))[:, 0], maps()[:, 0])
    square = cross_products(part[None], part[None])[:, 0, 0]
    if times < 1:
        assert is_zero(rms(square))
        assert is_undefined(pattern_lost(part, part / 2))
    else:
        assert rms(square).value == pytest.approx(amplitude, rel=1e-4)
        assert pattern_lost(part, part / 2).value == pytest.approx(amplitude / 2, rel=1e-4)


@pytest.mark.parametrize("n_tokens", [1, 16])
def test_a_model_without_rope_has_no_pattern_on_equal_tokens(n_tokens: int) -> None:
    model = load("nope-tiny").model
    tokens = torch.arange(3, 3 + n_tokens).repeat(16 // n_tokens)[:, None].repeat(1, 128)
    maps = capture_scores(model, tokens, n_folds=4)
    last_digits = row_centred(maps.folds.double().mean(0))[:, kept_cells(128)]
    assert last_digits.abs().max() > 0  # which this is about
    for each in measure(maps, 0):
        assert is_zero(each.amplitude)
        assert is_undefined(each.locality)
