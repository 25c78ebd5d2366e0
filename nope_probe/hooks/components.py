"""Which components a model has: mask, RoPE, projections, MLP, learned positions."""

from __future__ import annotations

import torch
from torch import Tensor

from nope_probe.hooks.forward import hooks_attached, run_forward
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import is_causal, position_point
from nope_probe.hooks.names import COMPONENTS, Component
from nope_probe.hooks.protocols import Hook, HookedModel, HookPoint


def components(model: HookedModel) -> tuple[Component, ...]:
    """Return the components that a model has.

    RoPE counts if any block has it; a NoPE HookedTransformer (`W_pos = 0`) has no `pos_embed`.
    """
    return tuple(name for name in COMPONENTS if has_component(model, name))


def has_component(model: HookedModel, name: Component) -> bool:
    """Return whether a model has a component."""
    if name == "mask":
        return is_causal(model)
    if name == "rope":
        return any(rope_layers(model))
    if name == "mlp":
        layers = layers_of(model)
        return any(layer.has("hook_mlp_out") and not layer.attention_only for layer in layers)
    return name != "pos_embed" or position_point(model) is not None


def rope_layers(model: HookedModel) -> tuple[bool, ...]:
    """Return for each block whether it rotates q and k.

    One short forward pass shows it: in a NoPE layer RoPE's hook points do not fire, whatever the
    configuration says.
    """
    layers = layers_of(model)
    rotates = [False] * len(layers)

    def mark(index: int) -> Hook:
        def hook(tensor: Tensor, hook: HookPoint) -> None:
            rotates[index] = True

        return hook

    hooks = [
        (layer.point(layer.rope_point), mark(layer.index))
        for layer in layers
        if layer.has(layer.rope_point)
    ]
    with torch.inference_mode(), hooks_attached(hooks):
        if hooks:
            run_forward(model, torch.zeros(1, 2, dtype=torch.long))
    return tuple(rotates)
