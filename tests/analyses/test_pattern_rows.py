"""Attribution and measures by blocks of rows, against whole maps; offset profiles against means."""

import pytest
import torch
from support.dense_patterns import estimates
from support.fold_products import fold_products

from nope_probe.analyses.attribution import attribute
from nope_probe.analyses.contrasts import contrast_grams
from nope_probe.analyses.jackknife import jackknife, mean_intervals
from nope_probe.analyses.pattern_rows import bin_means, offset_bins, score_distance_sums
from nope_probe.maps.centred import kept_cells, row_centred
from nope_probe.maps.estimates import fold_weights, leave_one_out
from nope_probe.maps.fold_rows import PackedFolds
from nope_probe.maps.layers import LayerMaps, shared_patterns
from nope_probe.maps.maps import ScoreMaps, packed_tensors, stored_layers
from nope_probe.maps.rows import MapRows
from nope_probe.removal import Condition

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
    patterns = dict(zip(maps, shared_patterns(packed), strict=True))
    grams = contrast_grams(patterns, n_bytes=4 * n_bytes)
    expected = fold_products(cells, cells, WEIGHTS)
    torch.testing.assert_close(grams["pattern"].products, expected, rtol=1e-11, atol=1e-12)
    if skip == 0:
        assert list(grams) == ["pattern"], "no key is first"
        return
    leads = torch.stack(
        [
            torch.stack(
                [
                    captured[:, query, :skip].mean(-1) - captured[:, query, skip:query].mean(-1)
                    for query in range(skip + 8, N)
                ],
                1,
            )
            for captured in maps.values()
        ]
    )
    expected = fold_products(leads, leads, WEIGHTS)
    torch.testing.assert_close(grams["lead"].products, expected, rtol=1e-11, atol=1e-12)
    both = {CONDITIONS[1]: 2.0, CONDITIONS[3]: -1.0}
    size = grams["lead"].size(both)
    means = leave_one_out((2 * leads[1] - leads[3]).mean(1), WEIGHTS)
    expected_size = jackknife(estimates(means, COUNTS))
    for end in ("value", "low", "high"):
        assert getattr(size, end) == pytest.approx(getattr(expected_size, end), rel=1e-9)


def test_stored_maps_have_the_attribution_of_the_captured_ones() -> None:
    captured = {
        tuple(sorted(condition)): ScoreMaps(
            folds=torch.stack([folds(seed), folds(seed + 7)], 1),
            visible=torch.ones(2, N, N, dtype=torch.bool).tril(),
            counts=COUNTS,
            layers=(0, 1),
            query_positions=torch.arange(N),
        )
        for seed, condition in enumerate(CONDITIONS)
    }
    stored = {name: stored_layers(packed_tensors(maps)) for name, maps in captured.items()}
    expected = attribute(captured, skip_keys=1)
    attribution = attribute(stored, skip_keys=1)
    assert repr(attribution) == repr(expected)
    assert {"intact", "mask", "w_q"} <= {*attribution[1].conditions}


def test_bounds_of_unequal_folds_are_those_of_the_jackknife_over_all_sequences():
    sizes = [2, 3, 5, 7]
    sequences = torch.randn(17, 7, 7, generator=torch.Generator().manual_seed(2)).double()
    parts = sequences.split(sizes)
    means = torch.stack([part.mean(0) for part in parts])
    layer = LayerMaps.of(means, torch.tensor(sizes))
    by_distance = bin_means(layer.pattern, score_distance_sums, offset_bins(6))
    profile = mean_intervals(by_distance, layer.weights)
    values = [part.diagonal(-3, -2, -1).mean(-1) for part in parts]
    values_without = [torch.cat(values).mean()]
    values_without += [torch.cat(values[:fold] + values[fold + 1 :]).mean() for fold in range(4)]
    expected = jackknife(estimates(torch.stack(values_without), torch.tensor(sizes)))
    assert profile.value[2] == pytest.approx(expected.value)
    assert (profile.low[2], profile.high[2]) == pytest.approx((expected.low, expected.high))
