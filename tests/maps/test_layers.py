"""Rows of maps: which queries have them, how they are stored, their leads and patterns by loops."""

import pytest
import torch
from support.dense_patterns import estimates, fold_products, leads, other_keys, patterns
from torch import Tensor
from torch.nn.functional import pad

from nope_probe import UserError
from nope_probe.analyses.attribution import contrast_grams
from nope_probe.analyses.jackknife import jackknife
from nope_probe.analyses.pattern_rows import bin_means, offset_bins
from nope_probe.maps.estimates import fold_weights, leave_one_out
from nope_probe.maps.layers import LayerMaps, PackedFolds, Pattern, shared_patterns
from nope_probe.maps.rows import MapRows, choose_rows, diagonal_normalised
from nope_probe.removal import Condition

N, FOLDS = 29, 5
COUNTS = torch.tensor([3, 7, 2, 5, 11])
WEIGHTS = fold_weights(len(COUNTS), COUNTS)
SIZES = [1, 8 * FOLDS * N * 7, 1 << 20]  # bytes: a row at a time, seven rows, the whole map
CHOSEN = choose_rows(N, 13)
ROWS = {"all rows": torch.arange(N), "chosen rows": CHOSEN}


def scores(seed: int, window: int = N) -> Tensor:
    """Return fold means of scores of all queries, with a sink at key 0, in a sliding window."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(FOLDS, N, N, generator=generator, dtype=torch.float64)
    maps += torch.linspace(0, 3, N).double()
    maps[..., 0] += 7
    distance = torch.arange(N)[:, None] - torch.arange(N)
    return maps.masked_fill((distance < 0) | (distance >= window), torch.nan)


def layer(maps: Tensor, queries: Tensor, skip: int = 0) -> LayerMaps:
    return LayerMaps.of(maps[:, queries], COUNTS, queries, skip)


def dense(pattern: Pattern, **options: int) -> Tensor:
    rows = [block.rows for block in pattern.blocks(**options)]
    return torch.cat([pad(of_block, (0, N - of_block.shape[-1])) for of_block in rows], 1)


@pytest.mark.parametrize("queries", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [N, 17])
@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_a_row_is_its_lead_and_its_pattern_up_to_a_constant(
    skip: int, window: int, queries: Tensor
) -> None:
    x, y = scores(0, window), scores(1, window)
    one, other = shared_patterns([layer(maps, queries, skip) for maps in (x, y)])
    kept = other_keys(queries, N, skip, window)
    expected, of_other = (patterns(maps[:, queries], kept) for maps in (x, y))
    torch.testing.assert_close(dense(one)[:, kept], expected)
    assert not dense(one)[:, ~kept].any()
    product = fold_products(expected[None], of_other[None], WEIGHTS)[:, 0, 0]
    gram = contrast_grams({"one": one, "other": other})["pattern"]
    result = gram.product({"one": 1.0}, {"other": 1.0}).values
    torch.testing.assert_close(result, product, rtol=1e-12, atol=1e-12)
    if skip == 0:
        assert one.lead is None, "without a first key there is no lead"
        return
    assert one.lead is not None
    by_row = leads(x[:, queries], kept, skip)
    assert one.lead.queries.tolist() == queries[[*by_row]].tolist()
    of_blocks = [one.lead.rows(block.scores, block.start) for block in one.blocks()]
    measured = torch.cat(of_blocks, 1)
    torch.testing.assert_close(measured, torch.stack([*by_row.values()], 1))
    for row, query in enumerate(one.lead.queries.tolist()):
        rebuilt = dense(one)[:, queries.tolist().index(query), :query]
        rebuilt[:, :skip] += measured[:, row, None]
        truth = x[:, query, :query]
        if skip == 1:  # differences among several first keys are in neither part
            rest = rebuilt - truth
            assert (rest - rest.mean(-1, keepdim=True)).abs().max() <= 1e-12 * truth.abs().max()


@pytest.mark.parametrize("n", [7, 9])
def test_sequences_in_which_no_query_sees_eight_other_keys_have_no_lead(n: int) -> None:
    maps = torch.randn(FOLDS, n, n, generator=torch.Generator().manual_seed(0))
    assert LayerMaps.of(maps, skip_keys=1).pattern.lead is None
    longer = torch.randn(FOLDS, 10, 10, generator=torch.Generator().manual_seed(0))
    lead = LayerMaps.of(longer, skip_keys=1).pattern.lead
    assert lead is not None
    assert lead.queries.tolist() == [9]


@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("skip", [0, 2])
def test_any_block_size_gives_the_gram_matrix_of_whole_maps(
    n_bytes: int, skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.analyses.attribution.GRAM_BYTES", 4 * n_bytes)
    names = [Condition(item) for item in ((), ("mask",), ("w_q",), ("mask", "w_q"))]
    maps, kept = [scores(seed) for seed in range(4)], other_keys(ROWS["all rows"], N, skip)
    rows = MapRows(ROWS["all rows"], N)
    packed = [
        LayerMaps(folds=PackedFolds(rows.pack(of), rows), counts=COUNTS, skip_keys=skip)
        for of in maps
    ]
    shared = dict(zip(names, shared_patterns(packed), strict=True))
    grams, cells = contrast_grams(shared), patterns(torch.stack(maps), kept)
    expected = fold_products(cells, cells, WEIGHTS)
    torch.testing.assert_close(grams["pattern"].products[False], expected, rtol=1e-11, atol=1e-12)
    if skip == 0:
        assert list(grams) == ["pattern"], "no key is first"
        return
    of_rows = torch.stack([*leads(torch.stack(maps), kept, skip).values()], -1)
    expected = fold_products(of_rows, of_rows, WEIGHTS)
    torch.testing.assert_close(grams["lead"].products[False], expected, rtol=1e-11, atol=1e-12)
    size = grams["lead"].size({names[1]: 2.0, names[3]: -1.0})
    means = leave_one_out((2 * of_rows[1] - of_rows[3]).mean(1), WEIGHTS)
    assert size.ends == pytest.approx(jackknife(estimates(means, COUNTS)).ends, rel=1e-9)


def test_patterns_of_unlike_maps_are_refused() -> None:
    whole, rows = (layer(scores(0), queries) for queries in ROWS.values())
    with pytest.raises(UserError, match="rows of unlike queries"):
        shared_patterns([whole, rows])
    with pytest.raises(UserError, match="of 11 and 29 positions"):
        shared_patterns([whole, LayerMaps.of(torch.randn(FOLDS, 11, 11), COUNTS)])
    with pytest.raises(ValueError, match="from 0 to 26 skipped keys at 29 positions"):
        shared_patterns([layer(scores(0), ROWS["all rows"], 27)])


@pytest.mark.parametrize(
    ("n", "n_rows", "queries"),
    [
        (7, 1, [6]),
        (7, 2, [5, 6]),
        (7, 3, [4, 5, 6]),
        (19, 8, [2, 6, 10, 14, 15, 16, 17, 18]),
        (900, 131, [k * 836 // 67 - 1 for k in range(1, 68)] + [*range(836, 900)]),
    ],
)
def test_half_of_the_rows_and_at_most_64_are_the_run_at_the_end(
    n: int, n_rows: int, queries: list[int]
) -> None:
    assert choose_rows(n, n_rows).tolist() == queries


def test_maps_have_all_rows_up_to_2048_positions_and_512_above() -> None:
    assert [len(choose_rows(n)) for n in (5, 2048, 2049, 32768)] == [5, 2048, 512, 512]


@pytest.mark.parametrize("n_rows", [0, N + 1])
def test_no_rows_and_more_than_positions_are_refused(n_rows: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to {N} rows at {N} positions, got {n_rows}"):
        choose_rows(N, n_rows)


def test_packed_rows_are_the_cells_up_to_the_diagonal() -> None:
    rows = scores(0)[:, CHOSEN]
    of_rows = MapRows(CHOSEN, N)
    packed = of_rows.pack(rows)
    assert packed.shape == (FOLDS, int((CHOSEN + 1).sum()))
    torch.testing.assert_close(of_rows.unpack(packed), rows, equal_nan=True, rtol=0, atol=0)
    stored = PackedFolds(packed, of_rows)
    for start, stop in of_rows.blocks(FOLDS):
        expected = scores(0)[:, start:stop, :stop]
        torch.testing.assert_close(stored.rows(start, stop), expected, equal_nan=True)


def test_normalised_rows_have_no_mean_at_any_distance() -> None:
    normalised = diagonal_normalised(scores(0)[0, CHOSEN], MapRows(CHOSEN, N))
    distance = CHOSEN[:, None] - torch.arange(N)
    of_distance = [normalised[distance == d].nansum().abs() for d in range(N)]
    assert max(map(float, of_distance)) < 1e-9


def test_offsets_have_bins_of_their_own_to_64_and_then_eight_a_doubling() -> None:
    assert offset_bins(2047).tolist() == list(range(1, 2048))
    bins = offset_bins(8000)
    assert bins[:65].tolist() == list(range(1, 66))
    ends = (bins[1:] - 1)[63:]
    assert torch.equal(ends[8:48:8], 2 * ends[:40:8])


def test_the_mean_of_a_bin_is_that_of_its_cells() -> None:
    rows, bins = scores(0)[0, CHOSEN], torch.tensor([1, 2, 5, 11])
    distance = CHOSEN[:, None] - torch.arange(N)
    pattern = LayerMaps.of(rows[None], None, CHOSEN).pattern
    means = bin_means(pattern, "scores", bins)[0]
    for index, (first, behind) in enumerate([(1, 2), (2, 5), (5, 11), (11, N)]):
        cells = rows[(distance >= first) & (distance < behind)]
        assert float(means[index]) == pytest.approx(float(cells.mean()))
