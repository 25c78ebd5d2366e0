"""The mean term: the part of a score that all sequences share, estimated without bias."""

import pytest
import torch
from support.edited_model import edited
from support.plain_states import BlockStates, agree, per_fold, plain_states
from support.tiny_models import N_POS, ByName, ModelOf, tokens

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.attached_hooks import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.capture import capture_scores

N_SEQS, N_FOLDS = 37, 5
CAUSAL = torch.ones(N_POS, N_POS).tril().bool()


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return tokens(N_SEQS, seed=7)


def mean_over_pairs(states: BlockStates, fold: int) -> torch.Tensor:
    """Return the mean of q of one sequence times k of another over all pairs within a fold."""
    group = states.q.shape[2] // states.k.shape[2]
    q, k = states.q.double(), states.k.double().repeat_interleave(group, 2)
    ours = range(fold, N_SEQS, N_FOLDS)
    products = [torch.einsum("qhd,khd->qk", q[a], k[b]) for a in ours for b in ours if a != b]
    return torch.stack(products).mean(0) / (q.shape[2] * q.shape[3] ** 0.5)


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:smollm3", "hooked:smollm3-nope"])
def test_the_mean_term_is_the_mean_over_pairs_of_different_sequences(
    spec: str, model_of: ModelOf, tiny: ByName, inputs: torch.Tensor
) -> None:
    """So its expectation is <E q_i, E k_j>: q and k of different sequences are independent."""
    model, name = model_of(spec)
    maps = capture_scores(model, inputs, n_folds=N_FOLDS, mean_term=True)
    assert maps.mean_term is not None
    for layer, states in enumerate(plain_states(tiny(name).hf, inputs)):
        for fold in range(N_FOLDS):
            expected = mean_over_pairs(states, fold).masked_fill(~CAUSAL, torch.nan)
            assert agree(maps.mean_term[fold, layer], expected, 1e-5)


def test_the_mean_term_without_mask_and_rope_is_that_of_an_edited_model(
    bridge: ByName, tiny: ByName, inputs: torch.Tensor
) -> None:
    with ablated(bridge("llama"), Ablation(remove=["mask", "rope"])):
        maps = capture_scores(bridge("llama"), inputs, n_folds=N_FOLDS, mean_term=True)
    assert maps.mean_term is not None
    plain = edited(tiny("llama").hf, ["mask", "rope"])
    for layer, states in enumerate(plain_states(plain, inputs, rope=False)):
        assert agree(maps.mean_term[0, layer], mean_over_pairs(states, 0), 1e-5)


def test_mean_term_and_covariance_of_queries_and_keys_add_up_to_the_score(
    hooked: ByName, tiny: ByName, inputs: torch.Tensor
) -> None:
    maps = capture_scores(hooked("smollm3-nope"), inputs, n_folds=1, mean_term=True)
    assert maps.mean_term is not None
    for layer, states in enumerate(plain_states(tiny("smollm3-nope").hf, inputs)):
        q, k = states.q.double(), states.k.double().repeat_interleave(3, 2)
        q, k = q - q.mean(0), k - k.mean(0)
        covariance = torch.einsum("bqhd,bkhd->qk", q, k) / (N_SEQS - 1)
        content = covariance / (q.shape[-1] ** 0.5 * q.shape[2])
        total = (maps.mean_term[0, layer] + content).masked_fill(~CAUSAL, torch.nan)
        assert agree(maps.folds[0, layer], total, 1e-5)


def test_key_means_are_the_mean_keys_per_position(
    bridge: ByName, tiny: ByName, inputs: torch.Tensor
) -> None:
    maps = capture_scores(bridge("llama"), inputs, n_folds=N_FOLDS, mean_term=True)
    assert maps.key_means is not None
    for layer, states in enumerate(plain_states(tiny("llama").hf, inputs)):
        assert agree(maps.key_means[:, layer], per_fold(states.k.flatten(2), N_FOLDS), 1e-5)


def test_rewritten_scores_have_no_mean_term(bridge: ByName, inputs: torch.Tensor) -> None:
    model = bridge("llama")
    point = layers_of(model)[1].point("attn.hook_attn_scores")
    with (
        hooks_attached([(point, lambda scores, hook: 2 * scores)]),
        pytest.raises(NotImplementedError, match="L1 are not q"),
    ):
        capture_scores(model, inputs, mean_term=True)
