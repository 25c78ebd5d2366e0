"""Attribution and measures by blocks of rows, against whole maps; offset profiles against means."""

import pytest
import torch
from support.dense_patterns import estimates
from support.fold_products import fold_products

from nope_probe.analyses.contrasts import contrast_grams
from nope_probe.analyses.jackknife import jackknife
from nope_probe.maps.centred import kept_cells, row_centred
from nope_probe.maps.estimates import fold_weights, leave_one_out
from nope_probe.maps.fold_rows import PackedFolds
from nope_probe.maps.layers import LayerMaps, shared_patterns
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
