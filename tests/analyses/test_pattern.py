"""Pattern measures against hand arithmetic, scipy and plain least squares."""

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from nope_probe.analyses.pattern import edge_contrast, measure, relative_part
from nope_probe.analyses.trends import locality, monotonicity
from nope_probe.maps.centred import diagonal_normalised, edge_keys, kept_cells, row_centred

NAN = float("nan")


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
    assert row_centred(scores).equal(truth) or torch.equal(
        row_centred(scores).nan_to_num(77), truth.nan_to_num(77)
    )


def test_a_skipped_key_leaves_the_row_mean_too():
    scores = torch.tensor([[9.0, NAN, NAN, NAN], [5, 9, NAN, NAN], [50, 3, 9, NAN], [70, 2, 6, 9]])
    pattern = row_centred(scores, skip_keys=1)
    assert pattern[3, 1:3].tolist() == [-2, 2]
    assert pattern[2, 1] == 0
    assert pattern[:, 0].isnan().all()


def test_row_centring_leaves_its_input_alone():
    scores = torch.randn(5, 5)
    before = scores.clone()
    row_centred(scores)
    assert scores.equal(before)


def test_a_non_finite_cell_below_the_diagonal_is_an_error():
    scores = torch.zeros(7, 7)
    scores[5, 2] = torch.inf
    with pytest.raises(ValueError, match="non-finite"):
        row_centred(scores)


def test_non_finite_cells_on_and_above_the_diagonal_are_ignored():
    scores = torch.full((7, 7), torch.nan).triu() + torch.ones(7, 7).tril(-1)
    assert row_centred(scores)[kept_cells(7)].eq(0).all()


@pytest.mark.parametrize("skip", [-1, 5])
def test_skipping_nearly_all_keys_is_an_error(skip: int):
    with pytest.raises(ValueError, match="from 0 to 4 skipped keys at 7 positions"):
        kept_cells(7, skip)


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_the_relative_part_is_the_least_squares_projection(skip: int):
    n = 13
    pattern, cells = random_pattern(n, skip), kept_cells(n, skip)
    row, column = cells.nonzero().T
    design = torch.zeros(len(row), 2 * n, dtype=torch.float64)
    design[torch.arange(len(row)), row] = 1
    design[torch.arange(len(row)), n + row - column] = 1
    truth = design @ torch.linalg.lstsq(design, pattern[cells], driver="gelsd").solution
    torch.testing.assert_close(relative_part(pattern, skip)[cells], truth)


def test_alibi_is_relative_and_so_is_a_pattern_linear_in_the_key():
    n = 17
    i, j = torch.meshgrid(torch.arange(n).double(), torch.arange(n).double(), indexing="ij")
    for scores in (-0.3 * (i - j), 0.1 * j + 5.0 * i):
        pattern = row_centred(scores)
        rest = pattern - relative_part(pattern)
        assert rest[kept_cells(n)].abs().max() < 1e-12


def test_a_key_of_its_own_is_not_relative():
    scores = torch.zeros(17, 17, dtype=torch.float64)
    scores[:, 3] = 1.0
    pattern = row_centred(scores)
    rest = (pattern - relative_part(pattern))[kept_cells(17)]
    assert float(rest.square().sum() / pattern[kept_cells(17)].square().sum()) > 0.5


@pytest.mark.parametrize("skip", [0, 2])
def test_locality_is_the_mean_spearman_correlation_of_rows_with_eight_keys(skip: int):
    n = 19
    pattern = random_pattern(n, skip, seed=1)
    rows = range(skip + 8, n)
    truth = sum(spearmanr(pattern[i, skip:i], range(i - skip)).statistic for i in rows) / len(rows)
    assert float(locality(pattern, skip)) == pytest.approx(float(truth))


def test_ties_get_mean_ranks():
    scores = torch.randn(19, 19).mul(2).round().double()
    pattern = row_centred(scores)
    rows = range(8, 19)
    truth = sum(spearmanr(pattern[i, :i], range(i)).statistic for i in rows) / len(rows)
    assert float(locality(pattern)) == pytest.approx(float(truth))


def test_locality_is_one_if_scores_rise_towards_the_query_and_minus_one_if_they_fall():
    scores = torch.arange(23).double().repeat(23, 1)
    assert float(locality(row_centred(scores))) == pytest.approx(1)
    assert float(locality(row_centred(-scores.exp()))) == pytest.approx(-1)


def test_locality_of_a_flat_pattern_is_zero_and_of_too_few_keys_undefined():
    assert float(locality(row_centred(torch.zeros(13, 13)))) == 0
    assert locality(row_centred(torch.zeros(7, 7))).isnan()
    rising = torch.arange(13.0).repeat(13, 1)
    for skip_keys, truth in ((4, 1.0), (5, NAN), (11, NAN)):  # the last query has 12 keys
        found = float(locality(rising, skip_keys))
        assert found == pytest.approx(truth, nan_ok=True)


def test_monotonicity_counts_pairs_by_hand():
    scores = torch.tensor([[0.0] * 5, [0] * 5, [1, 2, 0, 0, 0], [3, 1, 2, 0, 0], [1, 1, 5, 4, 0]])
    pattern = row_centred(scores)
    # lag 1: row 2: 1<2; row 3: 3>1, 1<2; row 4: tie, 1<5, 5>4.
    assert float(monotonicity(pattern, lag=1)) == pytest.approx((1 + 0 + 1 + 0.5 + 1 + 0) / 6)
    # lag 2: row 3: 3>2; row 4: 1<5, 1<4.
    assert float(monotonicity(pattern, lag=2)) == pytest.approx(2 / 3)


def test_a_diagonal_normalised_map_has_no_relative_part_left():
    i, j = torch.meshgrid(torch.arange(11), torch.arange(11), indexing="ij")
    relative = torch.cos((i - j).double())
    assert diagonal_normalised(relative)[(i >= j)].abs().max() < 1e-12
    scores = torch.randn(11, 11, dtype=torch.float64)
    means = [diagonal_normalised(scores).diagonal(lag).mean() for lag in range(-10, 11)]
    assert torch.stack(means).abs().max() < 1e-12


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
    assert edge_keys(n, skip_keys) == skip_keys + n_first


def test_an_edge_contrast_can_differ_in_sign_from_that_of_the_non_relative_part():
    # Short rows score higher, which lifts the first keys on the map; softmax ignores that.
    scores = -0.1 * torch.arange(41).double()[:, None].repeat(1, 41)
    scores[:, :2] -= 0.2
    visible = row_centred(scores)
    assert float(edge_contrast(diagonal_normalised(scores))) > 0.1
    assert float(edge_contrast(visible - relative_part(visible))) < -0.1


def test_measures_of_a_known_pattern_in_noise_are_the_true_ones():
    n = 29
    truth = 0.2 * torch.arange(n).double().repeat(n, 1)
    truth[:, 4] += 1.0
    pattern = row_centred(truth)[kept_cells(n)]
    [measures] = measure(folds_of(truth, noise=0.3))
    amplitude = float(pattern.square().mean()) ** 0.5
    assert measures.amplitude.low < amplitude < measures.amplitude.high
    assert measures.amplitude.value == pytest.approx(amplitude, rel=0.02)
    full = row_centred(truth)
    rest = float((full - relative_part(full))[kept_cells(n)].square().mean())
    assert measures.relative_r2.value == pytest.approx(1 - rest / amplitude**2, abs=0.02)
    assert measures.non_relative.value == pytest.approx(rest**0.5, rel=0.1)
    assert measures.monotonicity.value > 0.9


def test_pure_noise_has_no_amplitude_and_no_relative_share():
    [measures] = measure(folds_of(torch.zeros(23, 23, dtype=torch.float64), noise=1.0))
    assert not measures.amplitude.excludes_zero
    assert measures.relative_r2.value != measures.relative_r2.value  # NaN: no pattern


def test_measures_of_layers_are_independent_of_each_other():
    one, other = folds_of(torch.eye(13).double(), 0.1), folds_of(torch.ones(13, 13).double(), 0.1)
    both = measure(torch.cat([one, other], dim=1))
    assert both == [measure(one)[0], measure(other)[0]]


def test_monotonicity_of_a_layer_is_at_lag_eight_and_that_of_lag_one_beside_it():
    pattern = random_pattern(31, seed=4)
    [measures] = measure(folds_of(pattern.nan_to_num(), noise=0.0))
    assert measures.monotonicity.value == pytest.approx(float(monotonicity(pattern, lag=8)))
    assert measures.monotonicity_lag1.value == pytest.approx(float(monotonicity(pattern, lag=1)))
    others = [float(monotonicity(pattern, lag=lag)) for lag in (1, 7, 9)]
    assert all(abs(measures.monotonicity.value - other) > 1e-3 for other in others)
    assert float(monotonicity(pattern)) == pytest.approx(measures.monotonicity.value)
