"""The parameter-free models equal the paper's equations, written out in plain PyTorch."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.rounding import NETWORK, PARAMETER_FREE
from support.tiny_models import distance
from torch import Tensor
from torch.nn.functional import layer_norm, normalize
from transformers import AutoConfig

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import run_blocks
from nope_probe.models.load import load
from nope_probe.models.names import CHECKPOINTS
from nope_probe.models.parameter_free import build, hooked_config, parameter_free

LAYERS, N_POS, D = 3, 13, 22


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, N_POS, D, generator=torch.Generator().manual_seed(0))


def attend(scores: Tensor, values: Tensor, causal: bool = True) -> Tensor:
    if causal:
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ values


def rope(y: Tensor) -> Tensor:
    """Turn the pair (f, f + d/2) of position p by the angle p * 10000^(-2f/d)."""
    half = y.shape[-1] // 2
    angle = torch.arange(y.shape[-2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = y[..., :half], y[..., half:]
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ],
        -1,
    )


def eq_1(x: Tensor) -> Tensor:
    y = normalize(x, dim=-1)
    return attend(y @ y.mT, y) + x


def eq_1_with_rope(x: Tensor) -> Tensor:
    y = normalize(x, dim=-1)
    return attend(rope(y) @ rope(y).mT, y) + x


def eq_1_encoder(x: Tensor) -> Tensor:
    y = normalize(x, dim=-1)
    return attend(y @ y.mT, y, causal=False) + x


def layer_norm_variant(
    divisor: float, turn: Callable[[Tensor], Tensor] = lambda y: y, causal: bool = True
) -> Callable[[Tensor], Tensor]:
    def block(x: Tensor) -> Tensor:
        y = layer_norm(x, x.shape[-1:], eps=1e-12)
        return attend(turn(y) @ turn(y).mT / divisor, y, causal) + x

    return block


@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({}, eq_1),
        ({"rope": True}, eq_1_with_rope),
        ({"causal": False}, eq_1_encoder),
        ({"norm": "layernorm-sqrt-d"}, layer_norm_variant(D**0.5)),
        ({"norm": "layernorm-d", "rope": True}, layer_norm_variant(D, rope)),
        ({"norm": "layernorm-d", "causal": False}, layer_norm_variant(D, causal=False)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_parameter_free_model_equals_the_papers_equation(
    options: dict[str, Any], block: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    model, expected = build(parameter_free(LAYERS, D, **options)), x
    for _ in range(LAYERS):
        expected = block(expected)
    assert distance(run_blocks(model, x), expected) <= PARAMETER_FREE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "at least 1 layer"),
        ((2, 0), "at least 1 layer and 1 dimension, got 2, 0"),
        ((2, 7, "l2", True), "an even d_model, got 7"),
        ((2, 8, "rms"), "unknown norm 'rms'; there are l2, layernorm-sqrt-d, layernorm-d"),
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
def test_weights_are_identities_so_that_removing_them_changes_nothing(norm: Any, x: Tensor) -> None:
    model = build(parameter_free(LAYERS, D, norm))
    before = run_blocks(model, x)
    with ablated(
        model, Ablation(remove=["w_q", "w_k", "w_o"], replacement="identity", gain="identity")
    ):
        assert distance(run_blocks(model, x), before) <= NETWORK
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
