"""What rounding leaves of equal scores is no pattern, and a little more than that is one."""

from math import isnan

import pytest
import torch
from support.dense_patterns import estimates as estimates_of
from support.dense_patterns import other_keys
from torch import Tensor

from nope_probe import attribute, capture_scores, load, measure, row_centred
from nope_probe.analyses.attribution import contrast_grams
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern_rows import ROUNDING, beyond_rounding
from nope_probe.maps.layers import LayerMaps

FOLDS, N = 5, 23
RMS = 7.0  # of the scores, nats


def is_undefined(interval: Interval) -> bool:
    return all(isnan(item) for item in (interval.value, interval.low, interval.high))


def is_zero(interval: Interval) -> bool:
    return (interval.value, interval.low, interval.high) == (0, 0, 0)


def ripple(amplitude: float, skip: int = 0) -> Tensor:
    """Return a pattern of this RMS, nats, without a relative part, the same in all folds."""
    key = torch.arange(N, dtype=torch.float64)
    pattern = row_centred((key * 2.3).sin() * key[:, None].cos(), skip)
    cells = other_keys(torch.arange(N), N, skip)
    return (pattern / pattern[cells].square().mean().sqrt() * amplitude).nan_to_num()


def maps(*patterns: Tensor) -> Tensor:
    """Return fold maps of one layer: scores of 7 nats and patterns."""
    return (RMS + sum(patterns, torch.zeros(N, N))).repeat(FOLDS, 1, 1, 1)


def test_the_bound_is_eight_times_what_float32_resolves() -> None:
    assert pytest.approx(8 * 2**-23) == ROUNDING
    squares = torch.tensor([(RMS * ROUNDING) ** 2, 9.0])
    assert not beyond_rounding(estimates_of(squares), RMS**2).values.any()
    assert not beyond_rounding(estimates_of(-squares), RMS**2).values.any()
    for beyond in (estimates_of(squares * 1.01), estimates_of(torch.tensor([torch.nan, 9.0]))):
        assert beyond_rounding(beyond, RMS**2) is beyond, "no number is not taken for none"


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("score", [0.0, 0.1, -3.3, 1e4 / 3, "rounded"])
def test_equal_scores_and_what_rounding_leaves_of_them_have_no_amplitude_and_no_trend(
    score: float | str, skip: int
) -> None:
    digits = maps(ripple(0.9 * RMS * ROUNDING, skip))
    constant = torch.full_like(digits, score) if isinstance(score, float) else digits
    measures = measure(constant, skip)[0]
    for name in ("amplitude", "not_by_distance"):
        assert is_zero(getattr(measures, name)), name
    for name in ("locality", "monotonicity", "relative_r2"):
        assert is_undefined(getattr(measures, name)), name


@pytest.mark.parametrize("skip", [0, 2])
def test_a_pattern_beyond_rounding_is_measured(skip: int) -> None:
    amplitude = 1.1 * RMS * ROUNDING
    measures = measure(maps(ripple(amplitude, skip)), skip)[0]
    assert measures.amplitude.value == pytest.approx(amplitude, rel=1e-4)
    assert measures.amplitude.low > 0
    assert not is_undefined(measures.locality)


@pytest.mark.parametrize("amplitude", [0.0, 2.5])
def test_a_source_that_changes_nothing_but_the_last_digits_makes_nothing_and_all_is_kept(
    amplitude: float,
) -> None:
    rope, digits = ripple(amplitude), ripple(0.5 * RMS * ROUNDING)
    intact, without_mask = maps(rope, digits), maps(rope)
    layer = attribute({(): intact, "mask": without_mask})[0]
    assert is_zero(layer.terms["pattern"]["mask"])
    kept = [layer.conditions[name].order for name in ("intact", "mask")]
    if amplitude:
        assert kept[1].value == pytest.approx(kept[0].value, rel=1e-5)
    else:
        assert all(map(is_undefined, kept))


@pytest.mark.parametrize(("amplitude", "is_pattern"), [(1e-7, False), (2e-7, True)])
def test_what_float32_attention_does_not_see_is_no_pattern_however_small_the_scores(
    amplitude: float, is_pattern: bool
) -> None:
    measures = measure(ripple(amplitude).repeat(FOLDS, 1, 1, 1))[0]
    assert measures.amplitude.value == pytest.approx(amplitude if is_pattern else 0, rel=1e-4)


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_a_positional_part_within_rounding_is_none(times: float) -> None:
    amplitude = times * RMS * ROUNDING * 2**0.5  # of two score maps
    scores, content = (LayerMaps.of(x[:, 0]).pattern for x in (maps(ripple(amplitude)), maps()))
    size = contrast_grams({"v": scores, "u": content})["pattern"].size({"v": 1.0, "u": -1.0})
    if times < 1:
        assert is_zero(size)
    else:
        assert size.value == pytest.approx(amplitude, rel=1e-4)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_lead_within_the_rounding_of_leads_is_none(times: float) -> None:
    """The other keys' scores are 0, so that only the first key's score has digits to round."""
    lead = 1000.0
    change = times * lead * ROUNDING * 2**0.5  # of two leads
    intact, changed = torch.zeros(2, FOLDS, N, N).double()
    intact[..., 0], changed[..., 0] = lead, lead + change
    layers = [LayerMaps.of(maps, skip_keys=1).pattern for maps in (intact, changed)]
    size = contrast_grams(dict(zip("vu", layers, strict=True)))["lead"].size({"u": 1.0, "v": -1.0})
    assert is_zero(size) if times < 1 else size.value == pytest.approx(change)


def test_a_model_without_rope_has_no_pattern_on_equal_tokens() -> None:
    model = load("nope-tiny").model
    maps = capture_scores(model, torch.arange(3, 19)[:, None].repeat(1, 67), n_folds=4)
    last_digits = row_centred(maps.folds.double().mean(0))[:, other_keys(torch.arange(67), 67, 0)]
    assert last_digits.abs().max() > 0  # which this is about
    for layer in measure(maps, 0).values():
        assert is_zero(layer.amplitude)
        assert is_undefined(layer.locality)
