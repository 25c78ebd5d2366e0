"""A weight that is stored in 8 bits is removed and traced as what it multiplies by."""

from copy import deepcopy

import torch
from support.rounding import NETWORK
from support.tiny_models import ByName, distance, tokens
from torch import Tensor, nn

from nope_probe import Ablation, ablated, capture_losses, load
from nope_probe.hooks.reading.readers import capture_positions

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
