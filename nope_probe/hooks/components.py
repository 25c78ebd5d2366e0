"""Which components a model has: mask, RoPE, projections, MLP, learned positions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.components import COMPONENTS, Component
from nope_probe.hooks.forward import hooks_attached, run_forward
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import has_alibi, is_causal, position_point
from nope_probe.hooks.protocols import HookedModel
from nope_probe.hooks.qk_reader import QKReader
from nope_probe.hooks.rope_bands import Rotary


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
    if name == "alibi":
        return has_alibi(model)
    if name == "mlp":
        layers = layers_of(model)
        return any(layer.has("hook_mlp_out") and not layer.attention_only for layer in layers)
    return name != "pos_embed" or position_point(model) is not None


def rope_layers(model: HookedModel) -> tuple[bool, ...]:
    """Return for each block whether it rotates q and k."""
    return tuple(rotary is not None for rotary in rotaries(model))


def rope_frequencies(model: HookedModel) -> tuple[Float[Tensor, " pair"] | None, ...]:
    """Return for each block the angle per position of its rotary pairs, or None if it has none."""
    return tuple(None if rotary is None else rotary.frequencies for rotary in rotaries(model))


def rotaries(model: HookedModel) -> tuple[Rotary | None, ...]:
    """Return for each block how it rotates queries and keys, or None if it does not.

    One short forward pass shows it: in a NoPE layer RoPE's hook points do not fire, whatever the
    configuration says.
    """
    readers = [QKReader(layer) for layer in layers_of(model)]
    names = ("hook_cos", "hook_sin", "hook_rot_q")
    hooks = [pair for reader in readers for pair in reader.hooks(names)]
    with torch.inference_mode(), hooks_attached(hooks):
        if hooks:
            run_forward(model, torch.zeros(1, 2, dtype=torch.long))
    return tuple(reader.layer.rotary(reader.fired) for reader in readers)
