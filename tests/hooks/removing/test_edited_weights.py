"""A model with other weights: random draws, plain norms; as before afterwards."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf, distance

from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.passes import run_blocks
from nope_probe.hooks.removing.weights import STD, untrained
from nope_probe.models.load import to_hooked
from nope_probe.models.parameter_free import build, parameter_free


def test_plain_norms_change_nothing_where_norms_have_no_weights():
    model = build(parameter_free(n_layers=2, d_model=10))
    x = torch.randn(3, 7, 10)
    before = run_blocks(model, x)
    with ablated(model, "norms"):
        assert distance(run_blocks(model, x), before) < NETWORK


@pytest.mark.hooked_transformer
def test_a_norm_weight_of_0_is_an_error(tiny: ByName):
    model = to_hooked(tiny("smollm3-rope").hf)
    model.blocks[0].ln2.w.data[3] = 0.0
    with pytest.raises(ValueError, match="L0 ln2 has a weight of 0, which cannot be divided out"):
        ablated(model, "norms").__enter__()


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-nope"])
def test_weights_are_random_inside_and_the_trained_ones_after_an_error(
    spec: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    before = parameters_of(model)
    with suppress(KeyError), untrained(model, seed=3):
        drawn = parameters_of(model)
        raise KeyError
    assert all(torch.equal(after, before[name]) for name, after in parameters_of(model).items())
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
    model, drawn = bridge("llama"), []
    for seed in (5, 5, 6):
        with untrained(model, seed):
            drawn.append(next(model.parameters()).clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with untrained(model, 5):
        with untrained(model, 6):
            assert torch.equal(next(model.parameters()), drawn[2])
        assert torch.equal(next(model.parameters()), drawn[0]), "left, the outer one is back"
