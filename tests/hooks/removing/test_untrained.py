"""Random weights for as long as a context lasts."""

from typing import Any

import pytest
import torch
from support.tiny_models import ByName, ModelOf

from nope_probe.hooks.removing.edited_weights import STD, untrained


def fail_after_reading(model: Any, drawn: dict[str, torch.Tensor]) -> None:
    drawn |= {name: each.clone() for name, each in model.named_parameters()}
    raise KeyError


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-nope"])
def test_weights_are_random_inside_and_the_trained_ones_after_an_error(
    spec: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    before = {name: each.clone() for name, each in model.named_parameters()}
    drawn: dict[str, torch.Tensor] = {}
    with pytest.raises(KeyError), untrained(model, seed=3):
        fail_after_reading(model, drawn)
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
    for name, each in drawn.items():
        is_bias = name.rpartition(".")[2].lstrip("_").startswith("b")
        if is_bias or not before[name].any():
            assert not each.any(), name
        elif each.ndim == 1:
            assert bool((each == 1).all()), name
        else:
            assert float(each.detach().std()) == pytest.approx(STD, rel=0.2), name
            assert not torch.equal(each, before[name])


def test_the_same_seed_draws_the_same_weights(bridge: ByName) -> None:
    model = bridge("llama")
    drawn = []
    for seed in (5, 5, 6):
        with untrained(model, seed):
            drawn.append(next(model.parameters()).clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
