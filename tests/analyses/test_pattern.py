"""Measures of patterns by their definitions: by hand, by scipy, with and without a window."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import isnan

import pytest
import torch
from scipy.stats import spearmanr
from support.dense_patterns import fold_products, leads, other_keys, patterns
from torch import Tensor

from nope_probe import UserError, measure, row_centred
from nope_probe.analyses.attribution import contrast_grams
from nope_probe.analyses.jackknife import signed_root
from nope_probe.analyses.pattern import measure_estimates
from nope_probe.analyses.pattern_rows import bin_means, offset_bins
from nope_probe.figures.words import MEASURES
from nope_probe.maps.layers import LayerMaps, PackedFolds, shared_patterns
from nope_probe.maps.maps import maps_by_layer
from nope_probe.maps.rows import MapRows, choose_rows, diagonal_normalised, first_visible_keys

N, N_FOLDS, NAN = 23, 4, float("nan")
QUERY, KEY = torch.arange(N)[:, None], torch.arange(N)[None]
CELLS = {
    "causal": KEY <= QUERY,
    "window": (KEY <= QUERY) & (QUERY - KEY < 13),
    "narrow": (KEY <= QUERY) & (QUERY - KEY < 5),
    "chunks": (KEY <= QUERY) & (QUERY // 11 == KEY // 11),
}


def folds(name: str, seed: int = 0) -> Tensor:
    noise = torch.randn(N_FOLDS, N, N, generator=torch.Generator().manual_seed(seed)).double()
    maps = 0.3 * noise + 3 * torch.sin(0.7 * (QUERY - KEY).double()) + 0.01 * KEY**2
    return maps.masked_fill(~CELLS[name], torch.nan)


def between_folds(x: Tensor, y: Tensor, weights: Tensor | None = None) -> float:
    return float(fold_products(x[None], y[None], weights)[0])


def by_hand(
    maps: Tensor,
    visible: Tensor,
    skip: int,
    queries: Tensor = QUERY[:, 0],
    counts: Sequence[int] = N_FOLDS * (1,),
) -> dict[str, float]:
    """Return the measures of fold maps by their definitions, from one loop over rows each."""
    kept = visible & (queries[:, None] > KEY) & (skip <= KEY)
    pattern, (row, key) = patterns(maps, kept), kept.nonzero().T
    basis = torch.zeros(len(row), 2 * N, dtype=torch.float64)
    basis[torch.arange(len(row)), row] = 1
    basis[torch.arange(len(row)), N + queries[row] - key] = 1
    fit = basis @ torch.linalg.lstsq(basis, pattern.T, driver="gelsd").solution
    rest = pattern - fit.T
    weights = torch.tensor(counts).double() / sum(counts)
    mean = weights @ pattern
    rows = [mean[row == i] for i in range(len(queries))]
    ordered = [of_row for of_row in rows if len(of_row) >= 8]
    rises = [of_row[8:] > of_row[:-8] for of_row in rows if len(of_row) > 8]
    square, rest_square = (between_folds(x, x, weights) for x in (pattern, rest))
    correlations = [spearmanr(of_row, range(len(of_row))).statistic for of_row in ordered]
    of_rows = [float(weights @ lead) for lead in leads(maps, kept, skip).values()]
    return {
        "lead": sum(of_rows) / len(of_rows) if of_rows else NAN,
        "amplitude": signed_root(square),
        "locality": sum(correlations) / len(correlations) if ordered else NAN,
        "monotonicity": float(torch.cat(rises).double().mean()) if rises else NAN,
        "relative_r2": 1 - rest_square / square,
        "not_by_distance": signed_root(rest_square),
    }


@pytest.mark.parametrize("rows", [N, 13])
@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("name", CELLS)
def test_measures_are_of_the_keys_that_a_query_sees(name: str, skip: int, rows: int) -> None:
    queries, counts = choose_rows(N, rows), (3, 7, 2, 5)
    maps, visible = folds(name)[:, queries], CELLS[name][queries]
    expected = by_hand(maps, visible, skip, queries, counts)
    layer = LayerMaps.of(maps, torch.tensor(counts), queries, skip)
    where = MapRows.of(maps, queries)
    packed = PackedFolds(where.pack(maps), where)
    result = measure(maps[:, None], skip, query_positions=queries, counts=torch.tensor(counts))[0]
    assert {*expected} == {*vars(result)}
    for measured, value in expected.items():
        assert getattr(result, measured).value == pytest.approx(value, rel=1e-8, nan_ok=True)
    estimates = measure_estimates(layer.pattern)
    for out in range(N_FOLDS):
        left = [fold for fold in range(N_FOLDS) if fold != out]
        without = by_hand(maps[left], visible, skip, queries, [counts[fold] for fold in left])
        for measured, of_all in estimates.items():
            value, is_square = without[measured.removesuffix("_squared")], "_squared" in measured
            value = value * abs(value) if is_square else value
            assert float(of_all.values[1 + out]) == pytest.approx(value, rel=1e-8, nan_ok=True)
    for kept, n_bytes in product((layer.folds, packed), (1, 8 * N_FOLDS * N * 7)):
        again = measure_estimates(replace(layer, folds=kept).pattern, n_bytes=n_bytes)
        for measured, of_all in estimates.items():
            torch.testing.assert_close(
                again[measured].values, of_all.values, rtol=1e-10, atol=1e-12, equal_nan=True
            )


@pytest.mark.parametrize("name", CELLS)
def test_the_first_visible_keys_are_those_of_the_window(name: str) -> None:
    maps = folds(name)
    expected = [min(*(CELLS[name][i].nonzero().flatten().tolist()), i) for i in range(N)]
    assert first_visible_keys(maps[0]).tolist() == expected
    rows = MapRows.of(maps)
    assert PackedFolds(rows.pack(maps), rows).first_keys.tolist() == expected
    pattern = row_centred(maps)
    assert pattern.isfinite()[0].equal(CELLS[name] & (KEY < QUERY))
    assert pattern.nansum(-1).abs().max() < 1e-12
    bins = offset_bins(N - 1)
    [profile] = bin_means(LayerMaps.of(maps[:1]).pattern, "scores", bins)
    for distance in range(1, N):
        mean = maps[0][CELLS[name] & (distance == QUERY - KEY)].mean()
        torch.testing.assert_close(profile[distance - 1], mean, equal_nan=True)


@pytest.mark.parametrize(("window", "amplitude"), [(1, NAN), (2, 0.0)])
def test_a_window_that_leaves_a_query_one_key_or_none_leaves_no_pattern(
    window: int, amplitude: float
) -> None:
    visible = (KEY <= QUERY) & (window > QUERY - KEY)
    maps = folds("causal").masked_fill(~visible, NAN)
    measures = measure(maps[:, None])[0]
    assert measures.amplitude.value == pytest.approx(amplitude, nan_ok=True)


def test_maps_without_a_number_are_an_error() -> None:
    with pytest.raises(ValueError, match="a score map has no finite cell"):
        measure(torch.full((N_FOLDS, 1, N, N), NAN))


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("n_rows", [N, 7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", [0, 1, 11, N - 1])
@pytest.mark.parametrize("name", ["causal", "window", "chunks"])
def test_a_position_without_numbers_is_no_window(
    name: str, position: int, value: float, n_rows: int, skip: int
) -> None:
    queries, maps = choose_rows(N, n_rows), folds(name)
    assert measure(maps[:, None, queries], skip, query_positions=queries)
    broken = (position == QUERY) | (position == KEY)
    maps[:, broken & CELLS[name]] = value
    if (broken & CELLS[name] & (KEY < QUERY))[queries].any():  # the last chunk is one token
        with pytest.raises(ValueError, match="non-finite cell below the diagonal"):
            measure(maps[:, None, queries], skip, query_positions=queries)


def test_conditions_are_compared_on_the_keys_that_all_of_them_see() -> None:
    kept = CELLS["narrow"] & (KEY < QUERY)
    intact, without = folds("narrow"), folds("window", seed=3)  # without the window: more keys
    v, u = patterns(without, kept), patterns(intact, kept)
    both = shared_patterns([LayerMaps.of(without), LayerMaps.of(intact)])
    gram = contrast_grams(dict(zip("vu", both, strict=True)))["pattern"]
    assert float(gram.product({"v": 1.0}, {"u": 1.0}).values[0]) == pytest.approx(
        between_folds(v, u)
    )
    assert gram.size({"v": 1.0}).value == pytest.approx(between_folds(v, v) ** 0.5)


def test_row_centring_by_hand():
    scores = torch.tensor([[9.0, NAN, NAN, NAN], [5, 9, NAN, NAN], [1, 3, 9, NAN], [1, 2, 6, 9]])
    truth = torch.tensor([[NAN] * 4, [0, NAN, NAN, NAN], [-1, 1, NAN, NAN], [-2, -1, 3, NAN]])
    torch.testing.assert_close(row_centred(scores), truth, equal_nan=True)
    without_first = torch.full((4, 4), NAN)
    without_first[2, 1], without_first[3, 1:3] = 0, torch.tensor([-2.0, 2.0])
    torch.testing.assert_close(row_centred(scores, skip_keys=1), without_first, equal_nan=True)


def test_only_a_non_finite_cell_below_the_diagonal_and_too_many_skipped_keys_are_errors():
    scores = torch.full((7, 7), NAN).triu() + torch.ones(7, 7).tril(-1)
    assert row_centred(scores)[other_keys(torch.arange(7), 7, 0)].eq(0).all()
    scores[5, 2] = torch.inf
    with pytest.raises(ValueError, match="non-finite"):
        row_centred(scores)
    for skip in (-1, 5):
        with pytest.raises(ValueError, match="from 0 to 4 skipped keys at 7 positions"):
            row_centred(scores, skip)


@pytest.mark.parametrize(("n", "skip"), [(1, 1), (2, 1), (3, 1), (2, 0)])
def test_sequences_that_are_too_short_are_named_by_their_length(n: int, skip: int) -> None:
    least = rf"expected sequences of {3 + skip} positions or more, got {n}"
    with pytest.raises(UserError, match=least):
        measure(torch.zeros(5, 2, n, n, dtype=torch.float64), skip)


@pytest.mark.parametrize("skip", [0, 2])
def test_locality_is_spearmans_and_ties_of_pairs_count_half(skip: int):
    n, generator = 23, torch.Generator().manual_seed(1)
    scores = (2 * torch.randn(n, n, generator=generator, dtype=torch.float64)).round()
    measures = measure(scores.repeat(5, 1, 1, 1), skip)[0]
    rows = [scores[i, skip:i] for i in range(skip + 8, n)]
    correlations = [spearmanr(row, range(len(row))).statistic for row in rows]
    assert measures.locality.value == pytest.approx(sum(correlations) / len(rows))
    rises = torch.cat([(1 + (row[8:] - row[:-8]).sign()) / 2 for row in rows])
    assert 0.5 in rises
    assert measures.monotonicity.value == pytest.approx(float(rises.mean()))
    flat = measure(torch.zeros(5, 1, n, n), skip)[0]
    assert isnan(flat.locality.value), "equal scores have no order"
    assert isnan(flat.monotonicity.value)


def test_diagonal_means_are_over_the_cells_that_hold_a_number():
    by_hand = diagonal_normalised(torch.tensor([[1.0, 7.0], [5.0, 3.0]]))
    assert by_hand.tolist() == [[-1, 0], [0, 1]]
    masked = torch.tensor([[1.0, NAN, NAN], [5, 4, NAN], [9, 8, 7]])
    truth = torch.tensor([[-3.0, NAN, NAN], [-1.5, 0, NAN], [0, 1.5, 3]])
    torch.testing.assert_close(diagonal_normalised(masked), truth, equal_nan=True)
    masked[1, 1], truth[1, 1] = NAN, NAN  # the diagonal's mean stays 4
    torch.testing.assert_close(diagonal_normalised(masked), truth, equal_nan=True)


def test_amplitudes_in_tables_are_the_measures_whose_interval_is_of_an_rms():
    [maps] = maps_by_layer(torch.randn(5, 1, 13, 13)).values()
    squares = [name for name in measure_estimates(maps.pattern) if name.endswith("_squared")]
    amplitudes = [name for name, words in MEASURES.items() if words.noise]
    assert [name.removesuffix("_squared") for name in squares] == amplitudes
