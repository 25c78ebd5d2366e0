"""What rounding leaves of equal scores is no pattern, and a little more than that is one."""

from math import isnan

import pytest
import torch
from torch import Tensor

from nope_probe import capture_scores, load
from nope_probe.analyses.attribution import attribute
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.kept_pattern import kept_patterns
from nope_probe.analyses.mask_effect import mask_effect
from nope_probe.analyses.pattern import kept_cells, measure, row_centred
from nope_probe.analyses.rounding import ROUNDING, exceeds_rounding, mean_squares
from nope_probe.analyses.shapley import player_set

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
        found += mean_squares(rows, start, skip, int(cells.sum()))
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
