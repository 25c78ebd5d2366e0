"""Weights of other forms: stored in 8 bits, or of key heads that each have a norm of their own."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from support.decoders import write_decoder
from support.edited_model import projections, ungrouped
from support.plain_attention import plain_maps
from support.rounding import NETWORK, assert_same
from support.tiny_models import ByName, distance, tokens
from torch import Tensor, nn
from transformers import PreTrainedModel

from nope_probe import Ablation, ablated, capture_losses, capture_scores, load
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.hooks.removing.weights import Place

TOKENS = tokens(5, 11)


class Int8Linear(nn.Module):
    """A linear map whose weight is stored in 8 bits, a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.abs().amax(1, keepdim=True) / 127
        rounded = (linear.weight / self.scale).round().to(torch.int8)
        self.weight, self.bias = nn.Parameter(rounded, requires_grad=False), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def test_packed_weights_are_removed_and_traced_as_what_they_multiply_by(tiny: ByName) -> None:
    hf, plain = deepcopy(tiny("llama").hf), deepcopy(tiny("llama").hf)
    for path in ("q_proj", "k_proj", "v_proj", "o_proj"):
        for layer, other in zip(hf.model.layers, plain.model.layers, strict=True):
            packed = Int8Linear(layer.self_attn.get_submodule(path))
            layer.self_attn.set_submodule(path, packed)
            other.self_attn.get_submodule(path).weight.data = packed.weight * packed.scale
    weights = ["w_q", "w_k", "w_v", "w_o"]
    removals = [
        *(Ablation(remove=name, replacement="mean") for name in ("mask", "rope", *weights)),
        Ablation(remove=weights, replacement="identity", gain="norm"),
        Ablation(remove="w_o", heads={0: [1, 4]}, replacement="zero"),
        Ablation(remove=["w_q", "w_o"], replacement=lambda weight, place: weight / 2),
    ]
    for removed in removals:
        losses = []
        for given in (hf, plain):
            with ablated(given, removed, tokens=TOKENS) as model:
                losses.append(capture_losses(model, TOKENS))
        assert distance(*losses) <= NETWORK
    traced, expected = (
        capture_positions(load(model).model, TOKENS, n_folds=2).readers[1] for model in (hf, plain)
    )
    for name, of_writer in expected.keys.items():
        assert distance(traced.keys[name], of_writer) <= NETWORK


def with_a_key_head_per_query_head(hf: PreTrainedModel, w_k: dict[int, Tensor]) -> PreTrainedModel:
    """Return plain transformers' model of as many key heads, with weights of keys set by hand."""
    copied = ungrouped(hf)
    for layer, weight in w_k.items():
        projections(copied, layer)["w_k"].weight.copy_(weight)
        attn = copied.model.layers[layer].self_attn
        if len(attn.k_norm.weight) > attn.head_dim:
            attn.k_norm = OfEachHead(hf.model.layers[layer].self_attn.k_norm)
    return copied


class OfEachHead(nn.Module):
    """Norms every key head as the model norms its only one."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, keys: Tensor) -> Tensor:
        return torch.cat([self.norm(head) for head in keys.chunk(6, -1)], -1)


@pytest.mark.parametrize(
    ("name", "n_kv_heads"),
    [
        ("gemma3_text", 1),  # Gemma 3 of 270M and 1B
        ("qwen3", 1),
        ("qwen3", 2),
        ("qwen3", 3),
        ("olmo2", 1),  # normed before heads are told apart
    ],
)
def test_removing_w_k_behind_a_norm_equals_an_edited_model(
    name: str, n_kv_heads: int, tmp_path: Path
) -> None:
    tiny = write_decoder(name, tmp_path, num_key_value_heads=n_kv_heads)
    model, drawn = load(str(tiny.folder)).model, dict[int, Tensor]()

    def draw(weight: Tensor, place: Place) -> Tensor:
        rows = torch.randn(6, *weight.shape[1:], generator=place.generator) / 7
        drawn[place.layer.index] = rows.mT.flatten(0, 1)
        return rows

    with ablated(model, Ablation(remove="w_k", replacement=draw)):
        maps, logits = capture_scores(model, tiny.tokens).mean, model(tiny.tokens)
    plain = with_a_key_head_per_query_head(tiny.hf, drawn)
    assert_same(maps, plain_maps(plain, tiny.tokens), NETWORK)
    assert_same(logits, plain(tiny.tokens).logits.detach(), NETWORK)
    intact = capture_scores(model, tiny.tokens).mean
    assert_same(intact, plain_maps(tiny.hf, tiny.tokens), NETWORK)
