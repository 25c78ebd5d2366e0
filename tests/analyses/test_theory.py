"""The theory of every layer against independent oracles: sums written out, quadrature, figures."""

import math

import pytest
import torch
from support.parameter_free import frequency_steps

from nope_probe import ParameterFreeSpec, build, parameter_free, theory_scores
from nope_probe.analyses import theory as paper
from nope_probe.analyses.simulation import spec_of
from nope_probe.analyses.theory import expected_gram, mean_field, rope_kernel, steps

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


def test_every_layer_of_the_mean_field_is_the_recursion_written_out():
    n, alpha = 5, 0.3
    gram = [[1.0 if i == j else alpha for j in range(n)] for i in range(n)]
    for scores in theory_scores(torch.tensor([alpha], dtype=torch.float64), n, 4)[0]:
        by_hand, gram = layer_by_hand(gram, 1.0)
        for i in range(n):
            assert scores[i, : i + 1].tolist() == pytest.approx(by_hand[i][: i + 1], abs=1e-12)
            assert scores[i, i + 1 :].isnan().all()


def test_the_expected_cosine_is_known_at_64_dimensions_and_the_arcsine_law_in_one():
    cosine = paper.expected_cosine(torch.tensor([0.0, 0.2, 0.5], dtype=torch.float64), 64)
    assert cosine.tolist() == pytest.approx([0.0, 0.1985039, 0.4970566], abs=5e-8)
    # y is a sign, and the signs of two Gaussians of correlation a agree with E = 2/pi asin(a).
    cosine = paper.expected_cosine(ALPHAS, 1)
    assert torch.allclose(cosine, 2 / math.pi * ALPHAS.asin(), atol=1e-12)


def test_a_batch_of_batches_is_carried_matrix_by_matrix():
    spec = ParameterFreeSpec(d_model=10, rope=True)
    grams = expected_gram(ALPHAS[:4], 7, spec).view(2, 2, 7, 7)
    together = list(steps(grams, 3, spec))
    for index in (0, 1):
        for batched, alone in zip(together, steps(grams[index], 3, spec), strict=True):
            for actual, theirs in zip(batched, alone, strict=True):
                torch.testing.assert_close(actual[index], theirs)


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
    "settings", [{"norm": "layernorm-d"}, {"d_model": 7, "rope": True}, {"d_model": 0}]
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
