"""What holds of pattern measures and fold arithmetic for any maps, sizes and skipped keys."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nope_probe.analyses.jackknife import (
    Interval,
    cross_products,
    fold_weights,
    leave_one_out,
    standard_error,
)
from nope_probe.analyses.pattern import Measures, measure, relative_part
from nope_probe.analyses.trends import locality, monotonicity
from nope_probe.maps.centred import kept_cells, row_centred

SEEDS = st.integers(0, 2**32 - 1)
N_POS = st.integers(13, 23)
SKIPS = st.integers(0, 3)
SCALES = st.floats(1e-3, 1e3)


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_trend(seed: int, n: int, n_folds: int = 5) -> Tensor:
    """Return fold maps of one layer whose pattern exceeds its noise."""
    truth = 0.3 * torch.arange(n).double() + randn(seed + 1, n, n)
    return truth + 0.1 * randn(seed, n_folds, 1, n, n)


def assert_close(one: Tensor, other: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-9, atol=atol)


def assert_scaled(found: Interval, expected: Interval, factor: float = 1.0) -> None:
    ends = (factor * expected.low, factor * expected.high)
    assert found.value == pytest.approx(factor * expected.value, rel=1e-6, abs=1e-9, nan_ok=True)
    assert found.low == pytest.approx(min(ends), rel=1e-6, abs=1e-9, nan_ok=True)
    assert found.high == pytest.approx(max(ends), rel=1e-6, abs=1e-9, nan_ok=True)


@given(SEEDS, N_POS, SKIPS)
def test_row_centring_twice_is_row_centring_once(seed: int, n: int, skip: int):
    once = row_centred(randn(seed, 2, n, n), skip)
    assert_close(row_centred(once, skip), once)
    cells = kept_cells(n, skip)
    assert_close(once.where(cells, 0.0).sum(-1), torch.zeros(2, n).double())


@given(SEEDS, N_POS, SKIPS)
def test_no_measure_of_the_pattern_sees_a_constant_added_to_a_row(seed: int, n: int, skip: int):
    folds = with_trend(seed, n)
    [before] = measure(folds, skip)
    [after] = measure(folds + 5 * randn(seed + 2, len(folds), 1, n, 1), skip)
    for field in fields(Measures):
        if field.name != "edge_contrast":  # that one is of the map, as the paper's
            assert_scaled(getattr(after, field.name), getattr(before, field.name))


@given(SEEDS, N_POS, SKIPS, SCALES)
def test_amplitudes_scale_with_the_map_and_shapes_do_not(
    seed: int, n: int, skip: int, scale: float
):
    folds = with_trend(seed, n)
    [before], [after] = measure(folds, skip), measure(scale * folds, skip)
    for name in ("amplitude", "non_relative", "edge_contrast", "edge_contrast_visible"):
        one, other = getattr(after, name), getattr(before, name)
        assert_scaled(
            Interval(value=one.value / scale, low=one.low / scale, high=one.high / scale), other
        )
    for name in ("locality", "monotonicity", "monotonicity_lag1", "relative_r2"):
        assert_scaled(getattr(after, name), getattr(before, name))


@given(SEEDS, N_POS, SKIPS)
def test_the_negative_map_has_the_same_amplitude_and_the_opposite_trend(
    seed: int, n: int, skip: int
):
    folds = with_trend(seed, n)
    [before], [after] = measure(folds, skip), measure(-folds, skip)
    for name in ("amplitude", "non_relative", "relative_r2"):
        assert_scaled(getattr(after, name), getattr(before, name))
    for name in ("locality", "edge_contrast", "edge_contrast_visible"):
        assert_scaled(getattr(after, name), getattr(before, name), -1.0)
    assert after.monotonicity.value == pytest.approx(1 - before.monotonicity.value, nan_ok=True)


@given(SEEDS, N_POS, SKIPS)
def test_rank_measures_do_not_change_under_a_rising_function_of_each_row(
    seed: int, n: int, skip: int
):
    maps = randn(seed, 3, n, n)
    slopes = randn(seed + 1, 3, n, 1).exp()
    patterns = row_centred(maps, skip)
    bent = row_centred(slopes * torch.sinh(maps) + maps**3, skip)
    assert_close(locality(bent, skip), locality(patterns, skip))
    for lag in (1, 8):
        assert_close(monotonicity(bent, lag, skip), monotonicity(patterns, lag, skip))


def with_keys_reversed(maps: Tensor, skip: int) -> Tensor:
    """Return maps whose kept keys come in the opposite order in every row."""
    reversed_maps = maps.clone()
    for i in range(skip, maps.shape[-1]):
        reversed_maps[..., i, skip:i] = maps[..., i, skip:i].flip(-1)
    return reversed_maps


@given(SEEDS, N_POS, SKIPS)
def test_a_map_with_its_keys_reversed_has_the_opposite_trend(seed: int, n: int, skip: int):
    maps = randn(seed, 3, n, n).round(decimals=1)  # with ties
    patterns = row_centred(maps, skip)
    back = with_keys_reversed(patterns, skip)
    assert_close(locality(back, skip), -locality(patterns, skip))
    for lag in (1, 2, 8):
        assert_close(monotonicity(back, lag, skip), 1 - monotonicity(patterns, lag, skip))


@given(SEEDS, N_POS, SKIPS)
def test_the_relative_part_is_an_orthogonal_projection(seed: int, n: int, skip: int):
    cells = kept_cells(n, skip)
    x, y = row_centred(randn(seed, 2, n, n), skip)
    of_x, of_y = relative_part(x, skip), relative_part(y, skip)
    assert_close(relative_part(of_x, skip), of_x)
    assert_close(relative_part(2 * x - 3 * y, skip), 2 * of_x - 3 * of_y)
    assert abs(float(((x - of_x) * of_y)[cells].sum())) < 1e-9 * n**2


@given(SEEDS, st.lists(st.integers(1, 9), min_size=4, max_size=7))
def test_leaving_a_fold_out_is_the_mean_over_the_sequences_of_the_others(
    seed: int, sizes: list[int]
):
    counts = torch.tensor(sizes)
    fold_of = torch.arange(len(sizes)).repeat_interleave(counts)
    values = randn(seed, len(fold_of), 3)
    folds = torch.stack([values[fold_of == f].mean(0) for f in range(len(sizes))])
    truth = [values.mean(0), *(values[fold_of != f].mean(0) for f in range(len(sizes)))]
    assert_close(leave_one_out(folds, counts), torch.stack(truth))
    assert float(fold_weights(len(sizes), counts).sum()) == pytest.approx(1)


@given(SEEDS, st.lists(st.integers(1, 9), min_size=4, max_size=6))
def test_inner_products_are_weighted_sums_over_pairs_of_different_folds(
    seed: int, sizes: list[int]
):
    n_folds, counts = len(sizes), torch.tensor(sizes)
    x, y = randn(seed, 2, n_folds, 5), randn(seed + 1, 3, n_folds, 5)
    found = cross_products(x, y, counts)
    for out in (None, *range(n_folds)):
        pairs = [
            (a, b) for a in range(n_folds) for b in range(n_folds) if a != b and out not in (a, b)
        ]
        weight = sum(sizes[a] * sizes[b] for a, b in pairs)
        total = sum(sizes[a] * sizes[b] * x[:, a] @ y[:, b].T / 5 for a, b in pairs)
        assert_close(found[0 if out is None else 1 + out], total / weight)


@given(SEEDS, st.permutations(range(5)))
def test_no_measure_depends_on_the_order_of_the_folds(seed: int, order: list[int]):
    folds = with_trend(seed, 13)
    [before], [after] = measure(folds), measure(folds[order])
    for field in fields(Measures):
        assert_scaled(getattr(after, field.name), getattr(before, field.name))


@given(SEEDS, SCALES)
def test_standard_errors_scale_and_ignore_what_all_folds_share(seed: int, scale: float):
    folds = randn(seed, 6, 4)
    assert_close(standard_error(scale * folds + 7) / scale, standard_error(folds), atol=1e-8)
    assert_close(standard_error(folds), folds.std(0) / 6**0.5)
