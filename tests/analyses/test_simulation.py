"""The simulation against eq. (1) written out in float64, long runs and automatic derivatives."""

import math
from functools import cache

import pytest
import torch
from support.parameter_free import frequency_steps, plain_layers
from support.rounding import assert_same, rounding
from torch.func import jvp

from nope_probe import ParameterFreeSpec, build, parameter_free, simulate_scores
from nope_probe.analyses.simulation import ControlVariate, Estimate, sample_inputs
from nope_probe.analyses.theory import expected_gram, steps

N, D = 7, 6
NORMS = ["l2", "layernorm-sqrt-d", "layernorm-d"]


@cache
def model(n_layers=3, d_model=D, norm="l2", rope=False, causal=True):
    return build(parameter_free(n_layers, d_model, norm, rope, causal))


def samples(count, alpha=0.3, seed=0, n=N, d=D):
    return sample_inputs(0, count, alpha=alpha, seq_len=n, d_model=d, seed=seed)


def resolved(x):
    """Average z_i conj(z_j) per frequency: real and imaginary parts."""
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :]).to(torch.complex128)
    gram = torch.einsum("sif,sjf->fij", z, z.conj()) / len(x)
    return torch.stack([gram.real, gram.imag])


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_a_sample_is_the_same_for_every_cut_into_chunks(cut):
    recipe = {"alpha": 0.3, "seq_len": 3, "d_model": 5, "seed": 11}
    pieces = torch.cat([sample_inputs(0, cut, **recipe), sample_inputs(cut, 131, **recipe)])
    assert torch.equal(pieces, sample_inputs(0, 131, **recipe))


def test_samples_are_unit_vectors_with_the_expected_inner_product():
    x = samples(20_000, alpha=0.5)
    cosine = (x[:, 2] * x[:, 5]).sum(-1)
    expected = expected_gram(torch.tensor([0.5]), 2, ParameterFreeSpec(d_model=D))[0, 0, 1]
    assert_same(x.norm(dim=-1), torch.ones(x.shape[:-1]), 2 * rounding(D))
    assert abs(cosine.mean() - expected) < 4 * cosine.std() / 20_000**0.5


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_mean_is_that_of_the_equation_written_out(norm, rope, causal):
    simulated = simulate_scores(model(3, D, norm, rope, causal), alpha=0.3, seq_len=N, n_samples=70)
    scores, _ = plain_layers(samples(70), 3, norm, rope, causal)
    assert_same(simulated.plain.mean, scores.mean(0))


def test_the_standard_error_is_that_of_32_blocks_by_sample_index():
    result = simulate_scores(model(), alpha=0.3, seq_len=N, n_samples=96).plain
    maps, _ = plain_layers(samples(96), 3, "l2", rope=False, causal=True)
    blocks = torch.stack([maps[block::32].mean(0) for block in range(32)])
    assert_same(result.se, blocks.std(0) / 32**0.5)


def test_errors_count_blocks_by_their_samples_and_are_pooled_over_cells_below_the_diagonal():
    # Two samples of value 0 and 3 in block 0, one of value 9 in block 1: mean 4.
    folds = torch.tensor([1.5, 9.0])[:, None, None, None].double()
    estimate = Estimate(folds=folds, counts=torch.tensor([2, 1]))
    assert estimate.mean.item() == pytest.approx(4)
    assert estimate.se.item() == pytest.approx(math.sqrt((2 * 2.5**2 + 5**2) / 3))
    folds = torch.zeros(2, 1, 3, 3).double().masked_fill(torch.ones(3, 3).triu(1).bool(), torch.nan)
    folds[0, 0, 2, 0], folds[0, 0, 1, 1] = 6, 99
    assert Estimate(folds=folds, counts=torch.tensor([5, 5])).pooled_se.item() == pytest.approx(
        3**0.5
    )
    few = simulate_scores(model(), alpha=0.3, seq_len=N, n_samples=5)
    assert few.plain.counts.tolist() == [1] * 5, "as many blocks as samples"
    assert few.best.pooled_se.isfinite().all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_control_variate_is_the_derivative_of_the_mean_field(norm, rope, causal):
    spec = ParameterFreeSpec(d_model=D, norm=norm, rope=rope, causal=causal)
    variate, x = ControlVariate(0.3, N, 4, spec, 1), samples(5)
    variate.add(x)
    u = x if norm == "l2" else torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)
    start, mean = expected_gram(torch.tensor([0.3]), N, spec)[0], (u @ u.mT).double().mean(0)
    if rope:  # resolved by frequency
        start = torch.stack([start, 0 * start])[:, None].repeat(1, D // 2, 1, 1) / (D // 2)
        mean = resolved(u)

    def scores(gram):
        if rope:
            return torch.stack(list(frequency_steps(gram, 4, spec)))
        return torch.stack([score for score, _, _ in steps(gram, 4, spec)])

    _, slope = jvp(scores, (start,), (mean - start,))
    assert_same(variate.deviations()[0], slope)


@pytest.mark.parametrize("rope", [False, True])
def test_the_control_variate_keeps_folds_apart_for_every_cut_into_chunks(rope):
    spec, x = ParameterFreeSpec(d_model=D, rope=rope), samples(11).double()
    whole, pieces = (ControlVariate(0.3, N, 3, spec, 2) for _ in range(2))
    whole.add(x)
    pieces.add(x[:3])
    pieces.add(x[3:])
    alone = ControlVariate(0.3, N, 3, spec, 1)
    alone.add(x[1::2])
    assert_same(whole.deviations(), pieces.deviations(), 1e-9)
    assert_same(whole.deviations()[1], alone.deviations()[0], 1e-9)


def test_the_controlled_mean_is_unbiased():
    actual, settings = model(), {"alpha": 0.3, "seq_len": N, "chunk_size": 4096}
    many = {"n_samples": 40_000, "seed": 1, "control_variate": False}
    long = simulate_scores(actual, **settings, **many).plain
    short = simulate_scores(actual, **settings, n_samples=4096).controlled
    z = (short.mean - long.mean) / (short.se**2 + long.se**2).sqrt()
    below = torch.ones(N, N, dtype=torch.bool).tril(-1)
    assert z[:, below].abs().max() < 4
    assert z[:, below].abs().mean() < 1.2  # 0.8 if the standard errors are right


@pytest.mark.parametrize(("target", "control_variate"), [(2e-3, True), (1e-2, False)])
def test_a_target_error_is_reached_in_every_layer_without_many_more_samples(
    target: float, control_variate: bool
):
    settings = {"alpha": 0.3, "seq_len": N, "chunk_size": 512, "control_variate": control_variate}
    simulated = simulate_scores(model(), target_se=target, **settings)
    assert target / 2 < simulated.best.pooled_se.max() <= target
    assert (simulated.controlled is not None) == control_variate
    assert (simulated.plain.pooled_se.max() > 2 * target) == control_variate


@pytest.mark.parametrize(
    "settings",
    [
        {"n_samples": 0},
        {"n_samples": 1},
        {"target_se": 1e-9},
        {},
        {"n_samples": 9, "target_se": 1.0},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"samples|float32"):
        simulate_scores(model(), alpha=0.3, seq_len=N, **settings)


def test_no_two_blocks_or_seeds_share_their_noise():
    """A seed has 2^32 blocks: with an even stride the second half would repeat the first."""
    recipe = {"alpha": 0.0, "seq_len": 2, "d_model": 3}
    first = sample_inputs(0, 64, **recipe, seed=5)
    for block, seed in ((1, 5), (2, 5), (2**30, 5), (2**31, 5), (0, 6)):
        other = sample_inputs(64 * block, 64 * block + 64, **recipe, seed=seed)
        assert not torch.isclose(first, other).all(-1).any(), block
    assert torch.equal(first, sample_inputs(64 * 2**32, 64 * 2**32 + 64, **recipe, seed=5))
    with pytest.raises(ValueError, match=r"0 <= alpha < 1"):
        sample_inputs(0, 1, **{**recipe, "alpha": 1.0}, seed=0)
