"""One block's hook points, weights and steps from q and k to scores, on each kind of model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from support.edited_model import projections
from support.rounding import NETWORK, assert_same, rounding
from support.tiny_models import (
    CONFIGS,
    ByName,
    ModelOf,
    distance,
    plain,
    randomised,
    tokenizer,
    tokens,
)
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_adjacent
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from nope_probe import load
from nope_probe.hooks.layers.attention import repeat_heads
from nope_probe.hooks.layers.base_layer import fit_rotary
from nope_probe.hooks.layers.hook_points import (
    first,
    hooks_attached,
    hooks_detached,
    hooks_in_place,
    last,
    methods_replaced,
)
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import read_attention
from nope_probe.hooks.layers.tap import RemovedPairs
from nope_probe.removal import Component


def test_the_type_checks_of_shapes_are_on(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--jaxtyping-packages"):
        pytest.skip("make shapes checks them")
    with pytest.raises(TypeCheckError):
        repeat_heads(torch.zeros(2, 3, 5), 6)


@pytest.mark.parametrize("d_rotary", [6, 10])
@pytest.mark.parametrize("layout", ["halves", "adjacent", "half width", "complex"])
def test_a_rotation_is_recognised_and_turned_back(layout: str, d_rotary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, 3, 10, generator=generator)
    theta = 1 + torch.rand(d_rotary // 2, generator=generator)
    theta[1] *= -1  # from the second coordinate to the first
    once = torch.arange(7.0)[None, :, None] * theta
    cos, sin = once.repeat(1, 1, 2).cos(), once.repeat(1, 1, 2).sin()
    rotate = rotate_halves if layout in ("halves", "half width") else rotate_adjacent
    turned, _ = rotate(x[..., :d_rotary], x[..., :d_rotary], cos, sin, unsqueeze_dim=2)
    turned = torch.cat([1.2 * turned, x[..., d_rotary:]], -1)
    straight = torch.cat([1.2 * x[..., :d_rotary], x[..., d_rotary:]], -1)
    angles: Any = (1.2 * cos, 1.2 * sin)
    if layout == "half width":
        angles = (1.2 * once.cos(), 1.2 * once.sin())
    if layout == "complex":
        angles = 1.2 * torch.polar(torch.ones_like(once), once)
    rotary = fit_rotary(angles, turned[0, 1], straight[0, 1])
    assert rotary is not None
    assert rotary.factor == pytest.approx(1.2, rel=rounding(d_rotary))
    assert_same(rotary.frequencies, theta, rounding(d_rotary))
    rotation = rotary.at(angles)
    assert_same(rotation.turned(straight), turned, rounding(d_rotary))
    some = slice(1, 4)
    assert_same(rotation.among(some).turned(straight[:, some]), turned[:, some], rounding(d_rotary))
    removed = RemovedPairs(bands=[Component("rope")], rotary=rotary)
    assert_same(removed.turned_back(turned, angles), straight, rounding(d_rotary))
    with pytest.raises(NotImplementedError, match="were not recognised"):
        replace(rotation, pairs=None).turned(straight)


@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:phi3", "bridge:gpt2", "hooked:smollm3-rope"]
)
def test_weights_per_head_are_views_that_multiply_as_transformers_projections(
    spec: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    for layer in layers_of(model):
        for projection, (weight, _) in projections(tiny.hf, layer.index).items():
            actual = layer.weight_per_head(projection)
            assert actual.data_ptr() == layer.weight(projection).data_ptr()
            joined = actual if projection == "w_o" else actual.transpose(0, 1)
            assert torch.equal(joined.reshape(weight.T.shape), weight.T)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_hook_point_that_does_not_exist_is_an_error_that_lists_them(
    spec: str, model_of: ModelOf
) -> None:
    layer = layers_of(model_of(spec)[0])[1]
    assert layer.has("attn.hook_attn_scores")
    assert not layer.has("attn.hook_atn_scores")
    message = r"block 1 has no hook point 'attn.hook_atn_scores'; it has .*attn.hook_attn_scores"
    with pytest.raises(KeyError, match=message):
        layer.point("attn.hook_atn_scores")


def test_hooks_run_in_order_and_only_they_are_removed(hooked: ByName) -> None:
    point, calls = layers_of(hooked("smollm3-rope"))[0].point("attn.hook_q"), []

    def note(name: str) -> Any:
        return lambda tensor, hook: calls.append(name)

    def run_once() -> str:
        calls.clear()
        hooked("smollm3-rope")(torch.zeros(1, 3, dtype=torch.long))
        return "".join(calls)

    with hooks_attached([(point, note("a"))]):
        with hooks_attached([(point, note("b")), (point, note("c"))]):
            assert run_once() == "abc"
        placed = [last(point, note("y")), first(point, note("b"))]
        placed += [last(point, note("z")), first(point, note("c"))]
        with hooks_in_place(placed), hooks_in_place([first(point, note("0"))]):
            point.add_hook(note("d"))
            assert run_once() == "0bcadyz"
            with hooks_detached(hooked("smollm3-rope")):
                assert run_once() == ""
            point.add_hook(note("e"))
            assert run_once() == "0bcadeyz"
            hooked("smollm3-rope").reset_hooks()
            assert run_once() == "0bcyz"
    assert run_once() == ""


def test_a_method_replaced_within_a_replacement_is_the_outer_ones_again() -> None:
    module = torch.nn.Identity()

    def adding(n: int) -> Any:
        forward = module.forward
        return methods_replaced(module, forward=lambda x: forward(x) + n)

    with adding(1):
        with adding(10):
            assert module(0) == 11
        assert module(0) == 1
    assert module(0) == 0


def test_hooks_are_removed_when_a_later_one_cannot_be_attached(hooked: ByName) -> None:
    layer = layers_of(hooked("smollm3-rope"))[0]
    names = ("attn.hook_q", "attn.hook_typo")
    with (
        pytest.raises(KeyError),
        hooks_attached((layer.point(name), lambda tensor, hook: None) for name in names),
    ):
        pass
    assert not layer.point("attn.hook_q").fwd_hooks


def test_the_scale_of_gpt2_can_fall_with_the_layers_index(tmp_path: Path) -> None:
    """As in Mistral's GPT-2 models: scores of block l are over l + 1 too."""
    config = CONFIGS["gpt2"]()
    config.n_layer, config.scale_attn_by_inverse_layer_idx = 3, True
    randomised(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model, inputs = load(str(tmp_path)).model, tokens(5)
    weights = plain(tmp_path)(inputs, output_attentions=True).attentions
    attentions = read_attention(model, inputs, lambda layer, attention: attention)
    for index, (layer, expected) in enumerate(zip(attentions, weights, strict=True)):
        assert layer.scale == pytest.approx(7**-0.5 / (index + 1))
        causal = layer.scores().masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
        assert distance(causal.softmax(-1), expected) <= NETWORK
