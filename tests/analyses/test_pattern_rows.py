"""Attribution and measures by blocks of rows, against whole maps; offset profiles against means."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from support.dense_patterns import edge_contrast, estimates, locality, monotonicity

from nope_probe.analyses.attribution import attribute
from nope_probe.analyses.jackknife import jackknife
from nope_probe.analyses.offsets import offset_means, offset_profiles
from nope_probe.analyses.pattern import measure_estimates, order_estimates
from nope_probe.analyses.pattern_rows import ContrastGram, relative_part
from nope_probe.analyses.shapley import player_set
from nope_probe.conditions import Condition
from nope_probe.maps.centred import diagonal_normalised, kept_cells, row_centred
from nope_probe.maps.estimates import cross_products, fold_weights, leave_one_out
from nope_probe.maps.fold_rows import PackedFolds, TensorFolds
from nope_probe.maps.layers import LayerMaps, patterns_of_others, shared_patterns
from nope_probe.maps.maps import ScoreMaps, packed_tensors, stored_layers
from nope_probe.maps.rows import MapRows

N, FOLDS = 23, 5
COUNTS = torch.tensor([3, 7, 2, 5, 11])
ROWS = MapRows(torch.arange(N), N)
WEIGHTS = fold_weights(len(COUNTS), COUNTS)
CONDITIONS = [Condition(item) for item in ((), ("mask",), ("w_q",), ("mask", "w_q"))]
SIZES = [1, 8 * FOLDS * N * 7, 1 << 20]  # bytes: a row at a time, seven rows, the whole map


def folds(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 0.2 * (seed + 1) * torch.arange(N).double() + torch.arange(N).double()[:, None]
    scores = scores + torch.randn(FOLDS, N, N, generator=generator, dtype=torch.float64)
    return scores.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), torch.nan)


@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("skip", [0, 2])
def test_any_block_size_gives_the_gram_matrix_of_whole_maps(n_bytes: int, skip: int) -> None:
    maps = {condition: folds(seed) for seed, condition in enumerate(CONDITIONS)}
    cells = torch.stack(
        [row_centred(captured, skip)[:, kept_cells(N, skip)] for captured in maps.values()]
    )
    packed = [
        LayerMaps(folds=PackedFolds(ROWS.pack(captured), ROWS), counts=COUNTS, skip_keys=skip)
        for captured in maps.values()
    ]
    patterns = patterns_of_others(packed)
    gram = ContrastGram.of(dict(zip(maps, patterns, strict=True)), n_bytes=4 * n_bytes)
    expected = cross_products(cells, cells, WEIGHTS)
    torch.testing.assert_close(gram.whole, expected, rtol=1e-11, atol=1e-12)
    assert gram.first.eq(0).all(), "no key of these patterns stands apart"
    split = dict(zip(maps, shared_patterns(packed), strict=True))
    parts, n_all = ContrastGram.of(split, n_bytes=4 * n_bytes), int(kept_cells(N).sum())
    others = expected * cells.shape[-1] / n_all
    torch.testing.assert_close(parts.others, others, rtol=1e-11, atol=1e-12)
    all_cells = torch.stack([row_centred(captured)[:, kept_cells(N)] for captured in maps.values()])
    whole = cross_products(all_cells, all_cells, WEIGHTS)
    torch.testing.assert_close(parts.first, whole - others, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(parts.whole, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("skip", [0, 3])
def test_any_block_size_gives_the_estimates_of_whole_maps(n_bytes: int, skip: int) -> None:
    scores, cells = folds(1), kept_cells(N, skip)
    patterns = row_centred(scores, skip)
    rest = patterns - relative_part(patterns)
    products = [
        cross_products(x[None], x[None], WEIGHTS) for x in (patterns[:, cells], rest[:, cells])
    ]
    means = leave_one_out(patterns, WEIGHTS)
    diagonal = diagonal_normalised(leave_one_out(scores, WEIGHTS))
    expected = {
        "amplitude_squared": products[0][:, 0, 0],
        "non_relative_squared": products[1][:, 0, 0],
        "locality": locality(means, skip),
        "monotonicity": monotonicity(means, 8, skip),
        "edge_contrast": edge_contrast(diagonal, skip),
        "edge_contrast_visible": edge_contrast(leave_one_out(rest, WEIGHTS), skip),
    }
    for kept in (TensorFolds(scores, ROWS), PackedFolds(ROWS.pack(scores), ROWS)):
        pattern = LayerMaps(folds=kept, counts=COUNTS, skip_keys=skip).others
        result = measure_estimates(pattern, n_bytes=n_bytes)
        assert list(result) == list(expected)
        for name, values in expected.items():
            torch.testing.assert_close(result[name].values, values, rtol=1e-10, atol=1e-12)


def test_stored_maps_have_the_attribution_of_the_captured_ones() -> None:
    players = [player_set(["mask", "w_q"])]
    captured = {
        tuple(sorted(condition)): ScoreMaps(
            folds=torch.stack([folds(seed), folds(seed + 7)], 1),
            visible=torch.ones(2, N, N, dtype=torch.bool).tril(),
            counts=COUNTS,
            layers=(0, 1),
        )
        for seed, condition in enumerate(CONDITIONS)
    }
    stored = {name: stored_layers(packed_tensors(maps)) for name, maps in captured.items()}
    expected = attribute(captured, players, sources=["mask"])
    attribution = attribute(stored, players, sources=["mask"])
    assert repr(attribution) == repr(expected)
    assert attribution[1].kept[Condition()].value == pytest.approx(1)
    shares = [player.share.value for player in attribution[1].players]
    assert shares == pytest.approx([player.share.value for player in expected[1].players], rel=1e-9)


def test_trends_are_those_of_the_queries_that_have_rows() -> None:
    queries, means = torch.arange(0, N, 5), leave_one_out(row_centred(folds(0)), WEIGHTS)
    layer = LayerMaps.of(folds(0)[:, queries], COUNTS, queries)
    order = order_estimates(layer.others)
    by_query = [
        [spearmanr(mean[query, :query], range(query)).statistic for query in (10, 15, 20)]
        for mean in means
    ]
    expected = torch.tensor(by_query, dtype=torch.float64).mean(1)
    torch.testing.assert_close(order["locality"].values, expected)
    rises = [means[:, query, 8:query] > means[:, query, : query - 8] for query in (10, 15, 20)]
    expected = torch.cat(rises, 1).double().mean(1)
    torch.testing.assert_close(order["monotonicity"].values, expected)


@pytest.mark.parametrize("skip", [0, 2])
def test_a_profile_is_the_mean_of_each_diagonal_of_the_kept_keys(skip: int) -> None:
    maps = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0)).double()
    result = offset_means(LayerMaps.of(maps, skip_keys=skip))
    for index in range(3):
        kept = maps[index, skip:, skip:].numpy()
        true = [np.diagonal(kept, -tau).mean() for tau in range(1, 7 - skip)]
        np.testing.assert_allclose(result[index].numpy(), true)


def test_bounds_of_unequal_folds_are_those_of_the_jackknife_over_all_sequences():
    sizes = [2, 3, 5, 7]
    sequences = torch.randn(17, 7, 7, generator=torch.Generator().manual_seed(2)).double()
    parts = sequences.split(sizes)
    means = torch.stack([part.mean(0) for part in parts])
    profile = offset_profiles([LayerMaps.of(means, torch.tensor(sizes))])
    values = [part.diagonal(-3, -2, -1).mean(-1) for part in parts]
    values_without = [torch.cat(values).mean()]
    values_without += [torch.cat(values[:fold] + values[fold + 1 :]).mean() for fold in range(4)]
    expected = jackknife(estimates(torch.stack(values_without), torch.tensor(sizes)))
    assert profile.value[0, 2] == pytest.approx(expected.value)
    assert (profile.low[0, 2], profile.high[0, 2]) == pytest.approx((expected.low, expected.high))
