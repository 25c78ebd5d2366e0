"""Patterns of layers, with and without a window, against definitions written out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from scipy.stats import spearmanr
from support.dense_patterns import fold_products, leads, patterns
from torch import Tensor

from nope_probe import measure, row_centred
from nope_probe.analyses.attribution import contrast_grams
from nope_probe.analyses.jackknife import signed_root
from nope_probe.analyses.pattern import measure_estimates
from nope_probe.analyses.pattern_rows import bin_means, offset_bins
from nope_probe.maps.layers import LayerMaps, PackedFolds, shared_patterns
from nope_probe.maps.rows import MapRows, choose_rows, first_visible_keys

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
