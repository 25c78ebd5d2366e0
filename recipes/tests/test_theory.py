"""What the paper claims of the parameter-free transformer, against the theory of every layer."""

import pytest
import torch

from critical_alphas import critical_alphas, n_rounds, smallest_step
from nope_probe.analyses import theory as paper
from nope_probe.analyses.simulation import simulate_scores, spec_of
from nope_probe.analyses.theory import theory_scores
from nope_probe.models.parameter_free import build, parameter_free


def test_figure_one_shows_0_154_0_132_and_0_151():
    second = paper.second_layer_scores(torch.tensor([0.0], dtype=torch.float64), 3)[0]
    assert second[1, 0].item() == pytest.approx(0.154, abs=5e-4)
    assert second[2, 0].item() == pytest.approx(0.132, abs=5e-4)
    assert second[2, 1].item() == pytest.approx(0.15082, abs=1e-5)


def test_layers_up_to_ten_increase_above_the_known_critical_alpha_and_below_it_one_does_not():
    rounds = []
    result = critical_alphas(50, 4, on_round=lambda: rounds.append(1))  # L2 is the last to increase
    assert result[0].isnan()
    assert result[1] == 0
    assert result.nan_to_num().max().item() == pytest.approx(0.0104, abs=5e-5)
    assert len(rounds) == n_rounds(1e-5)
    alphas = torch.tensor([0.0103, 0.0105], dtype=torch.float64)
    below, above = smallest_step(theory_scores(alphas, 50, 10))[:, 1:]
    assert below.min() < 0 < above.min()


def test_a_critical_alpha_near_zero_is_where_the_smallest_step_changes_sign():
    n = 31
    critical = critical_alphas(n, 3, tolerance=1e-4)[2]
    assert 1e-3 < critical < 1e-2
    around = critical + torch.tensor([-2e-4, 2e-4], dtype=torch.float64)
    below, above = smallest_step(theory_scores(around, n, 3))[:, 2]
    assert below < 0 < above


def test_without_correlation_the_papers_layers_3_and_4_do_not_increase_near_the_diagonal():
    scores = theory_scores(torch.tensor([0.0]), 50, 4)[0]
    assert smallest_step(scores)[2:].tolist() == pytest.approx([-2.8e-4, -4.4e-4], abs=5e-6)


@pytest.mark.parametrize(("alpha", "rope"), [(0.2, False), (0.0, True)])
def test_at_the_papers_sizes_the_control_variate_leaves_a_fortieth_of_the_variance(alpha, rope):
    simulated = simulate_scores(
        build(parameter_free(4, 64, rope=rope)), alpha=alpha, seq_len=50, n_samples=1000
    )
    assert simulated.variance_ratio[1:].min() > 40


def test_the_gap_to_the_mean_field_shrinks_as_one_over_d():
    gaps = []
    for d_model in (16, 64):
        outputs = build(parameter_free(3, d_model))
        simulated = simulate_scores(outputs, alpha=0.3, seq_len=7, n_samples=4096, chunk_size=512)
        theory = theory_scores(torch.tensor([0.3]), 7, 3, spec_of(outputs))[0]
        gaps.append((simulated.best.mean - theory).nan_to_num()[1:].square().mean((1, 2)).sqrt())
    assert ((gaps[0] / gaps[1]).log2() / 2).tolist() == pytest.approx([1, 1], abs=0.15)
