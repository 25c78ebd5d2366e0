"""The theory of every layer against independent oracles: sums written out, quadrature, figures."""

import math

import pytest
import torch
from support import appendix
from support.appendix import frequency_steps

from nope_probe.analyses.parameter_free import theory as paper
from nope_probe.analyses.parameter_free.simulation import spec_of
from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.analyses.parameter_free.theory import (
    critical_alphas,
    expected_gram,
    mean_field,
    n_rounds,
    rope_kernel,
    smallest_step,
    steps,
    theory_scores,
)
from nope_probe.models.parameter_free import build, parameter_free

ALPHAS = torch.tensor([0.0, 0.05, 0.2, 0.5, 0.9], dtype=torch.float64)


def layer_by_hand(gram, residual):
    """Mix a Gram matrix through one layer of eq. (1) with plain Python sums."""
    n = len(gram)
    norm = [math.sqrt(gram[i][i]) for i in range(n)]
    score = [[gram[i][j] / (norm[i] * norm[j]) for j in range(n)] for i in range(n)]
    mixing = [[0.0] * n for _ in range(n)]
    for i in range(n):
        total = sum(math.exp(score[i][j]) for j in range(i + 1))
        for j in range(i + 1):
            mixing[i][j] = math.exp(score[i][j]) / total / norm[j] + residual * (i == j)
    out = [
        [
            sum(mixing[i][k] * mixing[j][m] * gram[k][m] for k in range(n) for m in range(n))
            for j in range(n)
        ]
        for i in range(n)
    ]
    return score, out


@pytest.mark.parametrize("n", [2, 7, 53])
def test_the_second_layer_of_the_mean_field_is_equation_four(n):
    _, second = mean_field(ALPHAS, n, 2, ParameterFreeSpec())
    assert torch.allclose(second, paper.second_layer_scores(ALPHAS, n), atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_g_and_h_are_entries_of_the_gram_matrix_after_the_first_layer(alpha):
    n = 5
    gram = [[1.0 if i == j else alpha for j in range(n)] for i in range(n)]
    a, i = torch.tensor([alpha], dtype=torch.float64), torch.arange(1, n + 1)
    for residual, g, h in [
        (1.0, paper.g, paper.h_squared),
        (0.0, appendix.g_no_residual, appendix.h_squared_no_residual),
    ]:
        _, out = layer_by_hand(gram, residual)
        assert g(a, i)[0, 4].item() == pytest.approx(out[4][1], abs=1e-12)
        assert g(a, i)[0, 4].item() == pytest.approx(out[4][3], abs=1e-12)
        assert h(a, i)[0].tolist() == pytest.approx([out[k][k] for k in range(n)], abs=1e-12)


def test_every_layer_of_the_mean_field_is_the_recursion_written_out():
    n, alpha = 5, 0.3
    gram = [[1.0 if i == j else alpha for j in range(n)] for i in range(n)]
    for scores in theory_scores(torch.tensor([alpha], dtype=torch.float64), n, 4)[0]:
        by_hand, gram = layer_by_hand(gram, 1.0)
        for i in range(n):
            assert scores[i, : i + 1].tolist() == pytest.approx(by_hand[i][: i + 1], abs=1e-12)
            assert scores[i, i + 1 :].isnan().all()


def test_figure_one_shows_0_154_0_132_and_0_151():
    second = paper.second_layer_scores(torch.tensor([0.0], dtype=torch.float64), 3)[0]
    assert second[1, 0].item() == pytest.approx(0.154, abs=5e-4)
    assert second[2, 0].item() == pytest.approx(0.132, abs=5e-4)
    assert second[2, 1].item() == pytest.approx(0.15082, abs=1e-5)


def test_the_expected_cosine_is_known_at_64_dimensions_and_the_arcsine_law_in_one():
    cosine = paper.expected_cosine(torch.tensor([0.0, 0.2, 0.5], dtype=torch.float64), 64)
    assert cosine.tolist() == pytest.approx([0.0, 0.1985039, 0.4970566], abs=5e-8)
    # y is a sign, and the signs of two Gaussians of correlation a agree with E = 2/pi asin(a).
    cosine = paper.expected_cosine(ALPHAS, 1)
    assert torch.allclose(cosine, 2 / math.pi * ALPHAS.asin(), atol=1e-12)


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


def test_a_batch_of_batches_is_carried_matrix_by_matrix():
    spec = ParameterFreeSpec(d_model=10, rope=True)
    grams = expected_gram(ALPHAS[:4], 7, spec).view(2, 2, 7, 7)
    together = list(steps(grams, 3, spec))
    for index in (0, 1):
        for batched, alone in zip(together, steps(grams[index], 3, spec), strict=True):
            for actual, theirs in zip(batched, alone, strict=True):
                torch.testing.assert_close(actual[index], theirs)


def test_without_correlation_the_papers_layers_3_and_4_do_not_increase_near_the_diagonal():
    scores = theory_scores(torch.tensor([0.0]), 50, 4)[0]
    assert smallest_step(scores)[2:].tolist() == pytest.approx([-2.8e-4, -4.4e-4], abs=5e-6)


def test_without_mask_and_rope_positions_stay_exchangeable():
    for norm in ("l2", "layernorm-d", "layernorm-sqrt-d"):
        spec = ParameterFreeSpec(d_model=6, norm=norm, causal=False)
        last = theory_scores(torch.tensor([0.3]), 7, 3, spec)[0, 2]
        off = last[~torch.eye(7, dtype=torch.bool)]
        assert off.max() - off.min() < 1e-12


def test_the_rope_kernel_is_the_mean_product_of_rotated_isotropic_vectors():
    n, d = 5, 6
    total = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            total[i, j] = sum(math.cos((i - j) * 10_000 ** (-2 * f / d)) for f in range(3)) / 3
    assert torch.allclose(
        rope_kernel(n, ParameterFreeSpec(d_model=d, rope=True)), total, atol=1e-14
    )


@pytest.mark.parametrize("norm", ["l2", "layernorm-d", "layernorm-sqrt-d"])
@pytest.mark.parametrize("causal", [True, False])
def test_resolved_by_frequency_an_isotropic_gram_has_the_kernel_form(norm, causal):
    spec = ParameterFreeSpec(d_model=6, norm=norm, rope=True, causal=causal)
    gram = expected_gram(torch.tensor([0.3]), 5, spec)
    resolved = torch.stack([gram, 0 * gram], 1)[:, :, None].expand(-1, -1, 3, -1, -1) / 3
    kernel = [scores for scores, _, _ in steps(gram, 4, spec)]
    for actual, theirs in zip(kernel, frequency_steps(resolved, 4, spec), strict=True):
        assert torch.allclose(actual, theirs, atol=1e-12)


def test_layernorm_over_d_tends_to_one_second_layer_as_the_dimension_grows():
    # The residual is 1/sqrt(d) of the attention output, so it vanishes: eq. (4) without residual.
    spec = ParameterFreeSpec(d_model=10**6, norm="layernorm-d")
    alpha, i = torch.tensor([0.2], dtype=torch.float64), torch.tensor([4, 7])
    g, h = appendix.g_no_residual(alpha, i)[0], appendix.h_squared_no_residual(alpha, i)[0].sqrt()
    second = theory_scores(alpha, 7, 2, spec)[0, 1]
    assert second[6, 3].item() == pytest.approx((g[1] / (h[0] * h[1])).item(), abs=1e-2)


def test_layernorm_over_sqrt_d_makes_scores_sqrt_d_larger_in_the_first_layer():
    alpha = torch.tensor([0.2], dtype=torch.float64)
    small, large = (
        theory_scores(alpha, 3, 1, ParameterFreeSpec(d_model=16, norm=norm))[0, 0].nan_to_num()
        for norm in ("layernorm-d", "layernorm-sqrt-d")
    )
    assert torch.allclose(large, 4 * small)


def test_centring_takes_one_of_d_dimensions_off_a_unit_vectors_squared_length():
    d = 3
    vectors = torch.randn(20_000, d, generator=torch.Generator().manual_seed(0)).double()
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    measured = (unit - unit.mean(1, keepdim=True)).square().sum(1).mean()
    spec = ParameterFreeSpec(d_model=d, norm="layernorm-d")
    assert spec.start_scale == pytest.approx(float(measured), abs=0.01)


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "layernorm-d"},
        {"d_model": 7, "rope": True},
        {"d_model": 0},
    ],
)
def test_an_impossible_spec_is_refused(settings):
    with pytest.raises(ValueError, match=r"d_model|dimensions"):
        ParameterFreeSpec(**settings)


@pytest.mark.parametrize("alpha", [-0.1, 1.0, math.nan])
def test_an_alpha_outside_zero_to_one_is_refused(alpha):
    with pytest.raises(ValueError, match="0 <= alpha < 1"):
        list(mean_field(torch.tensor([alpha]), 3, 1, ParameterFreeSpec()))


@pytest.mark.parametrize("norm", ["l2", "layernorm-d", "layernorm-sqrt-d"])
def test_the_spec_of_a_model_is_the_one_it_was_configured_with(norm):
    settings = {"d_model": 6, "norm": norm, "rope": norm == "l2", "causal": norm != "l2"}
    result = spec_of(build(parameter_free(2, **settings)))
    assert result == ParameterFreeSpec(**settings)
    factor = 6**0.5 if norm == "layernorm-sqrt-d" else 1  # scores are larger, and so is rounding
    assert result.resolution == pytest.approx(factor * torch.finfo(torch.float32).eps)
