"""Pattern measures against hand arithmetic, scipy and plain least squares."""

from math import isnan

import pytest
import torch
from scipy.stats import spearmanr
from support.dense_patterns import other_keys

from nope_probe import UserError, measure, row_centred
from nope_probe.analyses.pattern import measure_estimates
from nope_probe.figures.words import MEASURES
from nope_probe.maps.maps import maps_by_layer
from nope_probe.maps.rows import diagonal_normalised

NAN = float("nan")


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
