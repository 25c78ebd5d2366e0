"""Which components a model has: mask, RoPE, projections, MLP, learned positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nope_probe.hooks.forward import hooks_attached
from nope_probe.hooks.layer import is_bridge, layers_of
from nope_probe.hooks.names import COMPONENTS, Component


def components(model: Any) -> tuple[Component, ...]:
    """List the components that a model has.

    RoPE counts if any block has it; a NoPE HookedTransformer (`W_pos = 0`) has no `pos_embed`.
    """
    return tuple(name for name in COMPONENTS if _has(model, name))


def _has(model: Any, name: Component) -> bool:
    if name == "mask":
        return getattr(model.cfg, "attention_dir", "causal") != "bidirectional"
    if name == "rope":
        return any(rope_layers(model))
    if name == "mlp":
        attention_only = getattr(model.cfg, "attn_only", False)
        return not attention_only and any(b.has("hook_mlp_out") for b in layers_of(model))
    return name != "pos_embed" or _learns_positions(model)


def rope_layers(model: Any) -> tuple[bool, ...]:
    """Tell for each block whether it rotates q and k.

    On a bridge one short forward pass tells: a NoPE layer is one whose `hook_cos` does not fire,
    whatever the configuration says.
    """
    blocks = layers_of(model)
    if not is_bridge(model):
        return (model.cfg.positional_embedding_type == "rotary",) * len(blocks)
    fired = [False] * len(blocks)

    def mark(index: int) -> Any:
        def hook(tensor: Tensor, hook: object) -> None:
            fired[index] = True

        return hook

    hooks = [
        (layer.point("attn.hook_cos"), mark(layer.index))
        for layer in blocks
        if layer.has("attn.hook_cos")
    ]
    with torch.inference_mode(), hooks_attached(hooks):
        model(torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device))
    return tuple(fired)


def position_point(model: Any) -> Any:
    """The hook point that carries learned position embeddings."""
    return model.hook_pos_embed if not is_bridge(model) else model.pos_embed.hook_out


def _learns_positions(model: Any) -> bool:
    if is_bridge(model):
        return "pos_embed" in model._modules
    learned = model.cfg.positional_embedding_type == "standard"
    return learned and bool(model.pos_embed.W_pos.any())
