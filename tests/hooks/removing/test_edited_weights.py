"""A model with other weights: a random basis, random draws, plain norms; as before afterwards."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf, distance, tokens
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_adjacent
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.model import run_blocks
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.hooks.removing.edited_weights import (
    STD,
    complex_map,
    invertible_map,
    reparametrised,
    untrained,
)
from nope_probe.models.load import to_hooked
from nope_probe.models.parameter_free import build, parameter_free

NORMS = ("input_layernorm", "post_attention_layernorm")
PLAIN_NORMS = Ablation(remove=["norms"])


def edited(hf: Any) -> Any:
    """Set the weights of the blocks' norms to 1 by hand, in a copy."""
    copied = deepcopy(hf)
    for block in copied.model.layers:
        for name in NORMS:
            getattr(block, name).weight.data.fill_(1.0)
    return copied


@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3", "hooked:smollm3-rope"]
)
def test_a_model_with_plain_norms_equals_an_edited_model(
    spec: str, tiny: ByName, model_of: ModelOf
):
    model, name = model_of(spec)
    with torch.no_grad():
        before, plain = model(tokens()), edited(tiny(name).hf)(tokens()).logits
        with ablated(model, PLAIN_NORMS):
            assert distance(model(tokens()), plain) < NETWORK
        assert distance(before, plain) > 1e-3
        assert model(tokens()).equal(before)


@pytest.mark.parametrize("letter", ["a", "f", "h"])
def test_stages_after_a_plain_norm_have_mean_square_1(hooked: ByName, bridge: ByName, letter: Any):
    for model in (hooked("smollm3-nope"), bridge("llama")):
        with ablated(model, PLAIN_NORMS):
            gram = capture_stages(model, tokens(), stages=[letter], n_folds=1).mean(letter)
        size = model.cfg.d_model
        assert gram.diagonal().tolist() == pytest.approx([size] * len(gram), rel=1e-3)


def test_an_ablation_with_plain_norms_equals_an_ablation_of_an_edited_model(
    tiny: ByName, hooked: ByName
):
    spec = Ablation(remove=["mask", "w_q", "w_k"], gain="norm")
    model, expected = hooked("smollm3-rope"), to_hooked(edited(tiny("smollm3-rope").hf))
    with torch.no_grad():
        with ablated(model, replace(spec, remove=["norms", *spec.remove])):
            outputs = model(tokens())
        with ablated(expected, spec):
            assert distance(outputs, expected(tokens())) < NETWORK


def test_plain_norms_change_nothing_where_norms_have_no_weights():
    model = build(parameter_free(n_layers=2, d_model=10))
    x = torch.randn(3, 7, 10)
    before = run_blocks(model, x)
    with ablated(model, PLAIN_NORMS):
        assert distance(run_blocks(model, x), before) < NETWORK


@pytest.mark.hooked_transformer
def test_a_norm_weight_of_0_is_an_error(tiny: ByName):
    model = to_hooked(tiny("smollm3-rope").hf)
    model.blocks[0].ln2.w.data[3] = 0.0
    with (
        pytest.raises(ValueError, match="L0 ln2 has a weight of 0, which cannot be divided out"),
        ablated(model, PLAIN_NORMS),
    ):
        pass


MODELS = [
    "hooked:smollm3-rope",
    "hooked:smollm3-nope",
    "bridge:llama",
    "bridge:phi3",
    "bridge:qwen3",
    "bridge:gpt2",
    "bridge:neox",
    "bridge:cohere",  # adjacent pairs
]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("spec", MODELS)
def test_a_reparametrisation_leaves_scores_and_outputs_as_they_are(model_of: ModelOf, spec: str):
    model, _ = model_of(spec)
    tokens = torch.randint(200, (5, 11), generator=generator())
    scores, logits = capture_scores(model, tokens, n_folds=5).mean, model(tokens)
    with reparametrised(model, generator()):
        again, turned = capture_scores(model, tokens, n_folds=5).mean, model(tokens)
    below = torch.ones(11, 11, dtype=torch.bool).tril()
    scale = scores[:, below].abs().max()
    assert float((again - scores)[:, below].abs().max() / scale) < NETWORK
    assert distance(turned, logits) < NETWORK
    assert model(tokens).equal(logits)


@pytest.mark.parametrize("spec", ["hooked:smollm3-rope", "bridge:llama"])
def test_it_changes_the_scores_without_a_single_matrix_but_not_without_a_circuit(
    model_of: ModelOf, spec: str
):
    model, _ = model_of(spec)
    tokens = torch.randint(200, (5, 11), generator=generator())

    def without(remove: list[str]) -> torch.Tensor:
        with ablated(model, Ablation(remove=remove, gain="identity")):
            return capture_scores(model, tokens, n_folds=5).mean.nan_to_num()

    def change(remove: list[str]) -> float:
        before = without(remove)
        with reparametrised(model, generator()):
            after = without(remove)
        return float((after - before).abs().max() / before.abs().max())

    assert change(["w_q"]) > 0.01
    assert change(["w_o"]) > 0.01
    assert change(["w_q", "w_k"]) < NETWORK
    assert change(["w_o", "w_v"]) < NETWORK


def test_weights_are_restored_bit_by_bit_when_the_body_raises(
    model_of: ModelOf,
):
    model, _ = model_of("bridge:llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), reparametrised(model, generator()):
        raise RuntimeError("stop")
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("adjacent", [False, True])
def test_a_complex_map_commutes_with_rope(adjacent: bool):
    coordinates = torch.arange(6)
    pairs = coordinates.view(3, 2) if adjacent else coordinates.view(2, 3).T
    turn = complex_map(3, 10, generator(), pairs)
    x = torch.randn(2, 7, 3, 10, generator=generator()).double()
    angle = torch.arange(7).double()[:, None] * torch.tensor([1.0, 0.3, 0.1]).repeat(2)
    cos, sin = angle.cos()[None], angle.sin()[None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        rotate = rotate_adjacent if adjacent else rotate_halves
        turned, _ = rotate(x[..., :6], x[..., :6], cos, sin, unsqueeze_dim=2)
        return torch.cat((turned, x[..., 6:]), -1)

    one = rotated(torch.einsum("bphd,hde->bphe", x, turn))
    other = torch.einsum("bphd,hde->bphe", rotated(x), turn)
    torch.testing.assert_close(one, other)


def test_random_bases_are_well_conditioned_and_differ_between_heads():
    maps = invertible_map(5, 11, generator())
    assert float(torch.linalg.cond(maps).max()) < 100
    assert float((maps[0] - maps[1]).abs().max()) > 0.1


def fail_after_reading(model: Any, drawn: dict[str, torch.Tensor]) -> None:
    drawn |= {name: parameter.clone() for name, parameter in model.named_parameters()}
    raise KeyError


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-nope"])
def test_weights_are_random_inside_and_the_trained_ones_after_an_error(
    spec: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    drawn: dict[str, torch.Tensor] = {}
    with pytest.raises(KeyError), untrained(model, seed=3):
        fail_after_reading(model, drawn)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    for name, weights in drawn.items():
        is_bias = name.rpartition(".")[2].lstrip("_").startswith("b")
        if is_bias or not before[name].any():
            assert not weights.any(), name
        elif weights.ndim == 1:
            assert bool((weights == 1).all()), name
        else:
            assert float(weights.detach().std()) == pytest.approx(STD, rel=0.2), name
            assert not torch.equal(weights, before[name])


def test_the_same_seed_draws_the_same_weights(bridge: ByName) -> None:
    model = bridge("llama")
    drawn = []
    for seed in (5, 5, 6):
        with untrained(model, seed):
            drawn.append(next(model.parameters()).clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
