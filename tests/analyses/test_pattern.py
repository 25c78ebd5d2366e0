"""Pattern measures against hand arithmetic, scipy and plain least squares."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from support.dense_patterns import edge_contrast, locality, monotonicity
from torch import Tensor

from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern import (
    Measures,
    measure,
    measure_estimates,
)
from nope_probe.analyses.pattern_rows import relative_part
from nope_probe.figures.words import MEASURES
from nope_probe.maps.centred import (
    KeptCells,
    diagonal_normalised,
    first_visible_keys,
    kept_cells,
    row_centred,
)
from nope_probe.maps.maps import maps_by_layer

NAN = float("nan")
SEEDS = st.integers(0, 2**32 - 1)
N_POS = st.integers(13, 23)
SKIPS = st.integers(0, 3)
SCALES = st.floats(1e-3, 1e3)


def random_pattern(n: int, skip: int = 0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return row_centred(torch.randn(n, n, generator=generator, dtype=torch.float64), skip)


def folds_of(maps: Tensor, noise: float, n_folds: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (n_folds, 1, *maps.shape)
    return maps + noise * torch.randn(shape, generator=generator, dtype=torch.float64)


def test_row_centring_by_hand():
    scores = torch.tensor([[9.0, NAN, NAN, NAN], [5, 9, NAN, NAN], [1, 3, 9, NAN], [1, 2, 6, 9]])
    truth = torch.tensor([[NAN] * 4, [0, NAN, NAN, NAN], [-1, 1, NAN, NAN], [-2, -1, 3, NAN]])
    torch.testing.assert_close(row_centred(scores), truth, equal_nan=True)
    without_first = torch.full((4, 4), NAN)
    without_first[2, 1], without_first[3, 1:3] = 0, torch.tensor([-2.0, 2.0])
    torch.testing.assert_close(row_centred(scores, skip_keys=1), without_first, equal_nan=True)


def test_only_a_non_finite_cell_below_the_diagonal_and_too_many_skipped_keys_are_errors():
    scores = torch.full((7, 7), NAN).triu() + torch.ones(7, 7).tril(-1)
    assert row_centred(scores)[kept_cells(7)].eq(0).all()
    scores[5, 2] = torch.inf
    with pytest.raises(ValueError, match="non-finite"):
        row_centred(scores)
    for skip in (-1, 5):
        with pytest.raises(ValueError, match="from 0 to 4 skipped keys at 7 positions"):
            kept_cells(7, skip)


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("ties", [False, True])
def test_locality_is_the_mean_spearman_correlation_of_rows_with_eight_keys(skip: int, ties: bool):
    n = 19
    pattern = random_pattern(n, skip, seed=1)
    pattern = row_centred((2 * pattern).round().nan_to_num(), skip) if ties else pattern
    rows = range(skip + 8, n)
    truth = sum(spearmanr(pattern[i, skip:i], range(i - skip)).statistic for i in rows) / len(rows)
    assert float(locality(pattern, skip)) == pytest.approx(float(truth))


def test_locality_of_a_flat_pattern_is_zero_and_of_too_few_keys_undefined():
    assert float(locality(row_centred(torch.zeros(13, 13)))) == 0
    assert locality(row_centred(torch.zeros(7, 7))).isnan()
    rising = torch.arange(13.0).repeat(13, 1)
    for skip_keys, truth in ((4, 1.0), (5, NAN), (11, NAN)):  # the last query has 12 keys
        result = float(locality(rising, skip_keys))
        assert result == pytest.approx(truth, nan_ok=True)


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("lag", [1, 8])
def test_monotonicity_is_the_share_of_pairs_that_rise_and_ties_count_half(skip: int, lag: int):
    pattern = random_pattern(13, skip).round(decimals=1)
    rises = [
        (1 + (pattern[i, j + lag] - pattern[i, j]).sign().item()) / 2
        for i in range(13)
        for j in range(skip, i - lag)
    ]
    assert 0.5 in rises or lag == 8
    assert float(monotonicity(pattern, lag, skip)) == pytest.approx(sum(rises) / len(rises))


def test_diagonal_means_are_over_the_cells_that_hold_a_number():
    by_hand = diagonal_normalised(torch.tensor([[1.0, 7.0], [5.0, 3.0]]))
    assert by_hand.tolist() == [[-1, 0], [0, 1]]
    masked = torch.tensor([[1.0, NAN, NAN], [5, 4, NAN], [9, 8, 7]])
    truth = torch.tensor([[-3.0, NAN, NAN], [-1.5, 0, NAN], [0, 1.5, 3]])
    torch.testing.assert_close(diagonal_normalised(masked), truth, equal_nan=True)
    masked[1, 1], truth[1, 1] = NAN, NAN  # the diagonal's mean stays 4
    torch.testing.assert_close(diagonal_normalised(masked), truth, equal_nan=True)


@pytest.mark.parametrize(
    ("n", "skip_keys", "n_first"),
    [(5, 0, 1), (29, 0, 1), (31, 0, 2), (36, 0, 2), (37, 3, 2), (49, 0, 2), (53, 2, 3)],
)
def test_the_first_twentieth_of_the_keys_is_rounded_to_the_nearest(
    n: int, skip_keys: int, n_first: int
) -> None:
    maps = torch.zeros(n, n, dtype=torch.float64)
    maps[:, skip_keys : skip_keys + n_first] = 1  # its mean is 1 and the others' 0, or less apart
    assert float(edge_contrast(maps, skip_keys)) == pytest.approx(1)
    assert KeptCells.of(first_visible_keys(maps), skip_keys).edge == skip_keys + n_first


def test_an_edge_contrast_can_differ_in_sign_from_that_of_the_non_relative_part():
    # Short rows score higher, which lifts the first keys on the map; softmax ignores that.
    scores = -0.1 * torch.arange(41).double()[:, None].repeat(1, 41)
    scores[:, :2] -= 0.2
    visible = row_centred(scores)
    assert float(edge_contrast(diagonal_normalised(scores))) > 0.1
    assert float(edge_contrast(visible - relative_part(visible))) < -0.1


def with_trend(seed: int, n: int) -> Tensor:
    """Return fold maps of one layer whose pattern exceeds its noise."""
    generator = torch.Generator().manual_seed(seed)
    truth = 0.3 * torch.arange(n).double() + torch.randn(n, n, generator=generator).double()
    return folds_of(truth, noise=0.1, n_folds=5)


def assert_scaled(result: Interval, expected: Interval, factor: float = 1.0) -> None:
    ends = (factor * expected.low, factor * expected.high)
    assert result.value == pytest.approx(factor * expected.value, rel=1e-6, abs=1e-9, nan_ok=True)
    assert result.low == pytest.approx(min(ends), rel=1e-6, abs=1e-9, nan_ok=True)
    assert result.high == pytest.approx(max(ends), rel=1e-6, abs=1e-9, nan_ok=True)


@given(SEEDS, N_POS, SKIPS)
def test_no_measure_sees_a_constant_added_to_a_row(seed: int, n: int, skip: int):
    folds = with_trend(seed, n)
    [before] = measure(folds, skip)
    [after] = measure(folds + 5 * torch.randn(len(folds), 1, n, 1, dtype=torch.float64), skip)
    for field in fields(Measures):
        assert_scaled(getattr(after, field.name), getattr(before, field.name))


@given(SEEDS, N_POS, SKIPS, SCALES)
def test_amplitudes_scale_with_the_map_and_shapes_do_not(
    seed: int, n: int, skip: int, scale: float
):
    folds = with_trend(seed, n)
    [before], [after] = measure(folds, skip), measure(scale * folds, skip)
    for name, words in MEASURES.items():
        one, factor = getattr(after, name), scale if words.unit == "nats" else 1.0
        divided = Interval(value=one.value / factor, low=one.low / factor, high=one.high / factor)
        assert_scaled(divided, getattr(before, name))


@given(SEEDS, N_POS, SKIPS)
def test_the_negative_map_has_the_same_amplitude_and_the_opposite_trend(
    seed: int, n: int, skip: int
):
    folds = with_trend(seed, n)
    [before], [after] = measure(folds, skip), measure(-folds, skip)
    for name in (name for name in MEASURES if name != "monotonicity"):
        sign = -1.0 if MEASURES[name].signed else 1.0
        assert_scaled(getattr(after, name), getattr(before, name), sign)
    assert after.monotonicity.value == pytest.approx(1 - before.monotonicity.value, nan_ok=True)


def test_amplitudes_in_tables_are_the_measures_whose_interval_is_of_an_rms():
    [maps] = maps_by_layer(with_trend(0, 13)).values()
    squares = [name for name in measure_estimates(maps.pattern) if name.endswith("_squared")]
    amplitudes = [name for name, words in MEASURES.items() if words.noise]
    assert [name.removesuffix("_squared") for name in squares] == amplitudes
