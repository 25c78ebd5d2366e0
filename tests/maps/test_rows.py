"""Which queries have rows, how rows are stored, and that what is measured of them is theirs."""

import pytest
import torch

from nope_probe.analyses.pattern_rows import bin_means, offset_bins
from nope_probe.maps.layers import LayerMaps, PackedFolds
from nope_probe.maps.rows import MapRows, choose_rows, diagonal_normalised

N, FOLDS = 37, 5
QUERIES = choose_rows(N, 13)
ROWS = MapRows(QUERIES, N)


def folds(window: int = N) -> torch.Tensor:
    """Scores of all queries with a trend, in a sliding window."""
    position = torch.arange(N)
    distance = position[:, None] - position
    generator = torch.Generator().manual_seed(window)
    scores = 0.3 * position.double() + torch.randn(
        FOLDS, N, N, generator=generator, dtype=torch.float64
    )
    return scores.masked_fill((distance < 0) | (distance >= window), torch.nan)


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
    rows = folds()[:, QUERIES]
    packed = ROWS.pack(rows)
    assert packed.shape == (FOLDS, int((QUERIES + 1).sum()))
    torch.testing.assert_close(ROWS.unpack(packed), rows, equal_nan=True, rtol=0, atol=0)
    stored = PackedFolds(packed, ROWS)
    for start, stop in ROWS.blocks(FOLDS):
        expected = folds()[:, start:stop, :stop]
        torch.testing.assert_close(stored.rows(start, stop), expected, equal_nan=True)


def test_normalised_rows_have_no_mean_at_any_distance() -> None:
    whole = folds()[0]
    rows = whole[QUERIES]
    normalised = diagonal_normalised(rows, ROWS)
    distance = QUERIES[:, None] - torch.arange(N)
    of_distance = [normalised[distance == d].nansum().abs() for d in range(N)]
    assert max(map(float, of_distance)) < 1e-9


def test_offsets_have_bins_of_their_own_to_64_and_then_eight_a_doubling() -> None:
    assert offset_bins(2047).tolist() == list(range(1, 2048))
    bins = offset_bins(8000)
    assert bins[:65].tolist() == list(range(1, 66))
    ends = (bins[1:] - 1)[63:]
    assert [int(ends[k + 8]) for k in range(0, 40, 8)] == [
        2 * int(ends[k]) for k in range(0, 40, 8)
    ]


def test_the_mean_of_a_bin_is_that_of_its_cells() -> None:
    rows, bins = folds()[0, QUERIES], torch.tensor([1, 2, 5, 11])
    distance = QUERIES[:, None] - torch.arange(N)
    pattern = LayerMaps.of(rows[None], None, QUERIES).pattern
    means = bin_means(pattern, "scores", bins)[0]
    for index, (first, behind) in enumerate([(1, 2), (2, 5), (5, 11), (11, N)]):
        cells = rows[(distance >= first) & (distance < behind)]
        assert float(means[index]) == pytest.approx(float(cells.mean()))
