"""The parameter-free models equal the paper's equations, written out in plain PyTorch."""

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.parameter_free import plain_layers
from support.rounding import NETWORK, PARAMETER_FREE
from support.tiny_models import distance
from transformers import AutoConfig

from nope_probe import Ablation, ablated, build, load, parameter_free
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import run_blocks
from nope_probe.models.names import CHECKPOINTS
from nope_probe.models.parameter_free import hooked_config

LAYERS, N_POS, D = 3, 13, 22
X = torch.randn(5, N_POS, D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", ["l2", "layernorm-sqrt-d", "layernorm-d"])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_parameter_free_model_equals_the_papers_equation(
    norm: Any, rope: bool, causal: bool
) -> None:
    model = build(parameter_free(LAYERS, D, norm, rope, causal))
    _, expected = plain_layers(X, LAYERS, norm, rope, causal)
    assert distance(run_blocks(model, X), expected) <= PARAMETER_FREE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "at least 1 layer"),
        ((2, 0), "at least 1 layer and 1 dimension, got 2, 0"),
        ((2, 7, "l2", True), "an even d_model, got 7"),
        ((2, 8, "rms"), "norm 'rms' should be 'l2', 'layernorm-sqrt-d' or 'layernorm-d'"),
    ],
)
@pytest.mark.usefixtures("unenforced")
def test_an_impossible_configuration_is_an_error(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parameter_free(*arguments)


@pytest.mark.parametrize("name", ["parameter-free", "rope-tiny"])
def test_models_without_files_to_fetch_load_where_warnings_are_errors(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(name).info.name == name


@pytest.mark.parametrize("name", ["parameter-free", "Parameter-Free-RoPE"])
def test_parameter_free_models_load_by_name_and_pass_the_parity_check(name: str) -> None:
    loaded = load(name, n_layers=2)
    assert loaded.tokenizer is None
    assert loaded.info.parameter_free
    assert loaded.info.rope_layers == (name.endswith("RoPE"),) * 2
    assert max(loaded.info.parity.values()) <= NETWORK


@pytest.mark.parametrize("norm", ["l2", "layernorm-sqrt-d", "layernorm-d"])
def test_weights_are_identities_so_that_removing_them_changes_nothing(norm: Any) -> None:
    model = build(parameter_free(LAYERS, D, norm))
    before = run_blocks(model, X)
    with ablated(
        model, Ablation(remove=["w_q", "w_k", "w_o"], replacement="identity", gain="identity")
    ):
        assert distance(run_blocks(model, X), before) <= NETWORK
    for layer in layers_of(model):
        value = layer.weight("w_v").squeeze()
        assert value.equal(torch.eye(D) * (D**-0.5 if norm == "l2" else 1.0))


def test_models_without_weights_are_equal_and_leave_the_random_numbers_alone(kind: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    one = build(parameter_free(2, 6)).state_dict()
    assert torch.equal(torch.rand(5), expected)
    other = build(parameter_free(2, 6)).state_dict()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    trained = hooked_config(AutoConfig.from_pretrained(CHECKPOINTS["nope-tiny"]))
    drawn = [build(trained).state_dict()["embed.W_E"] for _ in range(2 * (kind[0] == "H"))]
    assert not any(torch.equal(*pair) for pair in pairwise(drawn) if pair[0].any())
