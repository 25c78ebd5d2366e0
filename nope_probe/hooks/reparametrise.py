"""Rewrite a model's weights in another basis that computes the same scores and outputs.

W_Q and W_K are defined only up to an invertible map per key head that commutes with RoPE, W_V and
W_O up to any invertible map. What is said of a single matrix should survive such a rewriting; what
is said of the circuits (W_Q with W_K, W_V with W_O) does by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.layer import BridgeLayer, Layer, layers_of
from nope_probe.hooks.names import Projection

WEIGHTS: tuple[Projection, ...] = ("w_q", "w_k", "w_v", "w_o")
SPREAD = 0.5  # standard deviation of the logarithm of the factors


@contextmanager
def reparametrised(model: Any, generator: torch.Generator) -> Iterator[Any]:
    """Put a model into a random gauge for as long as the context lasts.

    Per key head, q and k are turned and stretched by one complex number per rotary pair (k by the
    inverse), v and o by a random invertible matrix. Blocks with q/k-norm keep their q and k: the
    norm stands between them and the scores. The weights are restored bit by bit.
    """
    layers = layers_of(model)
    saved = [(p, p.detach().clone()) for layer in layers for p in _parameters(layer)]
    try:
        with torch.no_grad():
            for layer in layers:
                _reparametrise(layer, generator)
        yield model
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def _reparametrise(layer: Layer, generator: torch.Generator) -> None:
    n_heads, d = layer.n_kv_heads, layer.d_head
    if not _has_qk_norm(layer):
        turn = complex_map(n_heads, d, _rotary_dim(layer), generator, layer.adjacent)
        _apply(layer, "w_q", turn)
        _apply(layer, "w_k", torch.linalg.inv(turn).mT)
    basis = invertible_map(n_heads, d, generator)
    _apply(layer, "w_v", basis)
    _apply(layer, "w_o", torch.linalg.inv(basis))


def complex_map(
    n_heads: int, d_head: int, d_rotary: int, generator: torch.Generator, adjacent: bool = False
) -> Float[Tensor, "head d_head d_head"]:
    """Draw per head one complex number for each rotary pair, as a matrix that acts on rows.

    Coordinates that RoPE leaves alone are paired in the same way.
    """
    maps = torch.eye(d_head, dtype=torch.float64).repeat(n_heads, 1, 1)
    for begin, end in ((0, d_rotary), (d_rotary, d_head)):
        half = (end - begin) // 2
        first = begin + (2 * torch.arange(half) if adjacent else torch.arange(half))
        second = first + (1 if adjacent else half)
        size = torch.exp(SPREAD * torch.randn(n_heads, half, generator=generator).double())
        angle = 2 * torch.pi * torch.rand(n_heads, half, generator=generator).double()
        maps[:, first, first] = maps[:, second, second] = size * angle.cos()
        maps[:, first, second] = size * angle.sin()
        maps[:, second, first] = -size * angle.sin()
    return maps


def invertible_map(
    n_heads: int, d_head: int, generator: torch.Generator
) -> Float[Tensor, "head d_head d_head"]:
    """Draw a random invertible matrix per head, of moderate condition number."""
    left, right = (
        torch.linalg.qr(torch.randn(n_heads, d_head, d_head, generator=generator).double()).Q
        for _ in range(2)
    )
    sizes = torch.exp(SPREAD * torch.randn(n_heads, d_head, generator=generator).double())
    return left * sizes[:, None, :] @ right


def _apply(layer: Layer, name: Projection, maps: Float[Tensor, "kv_head d_head d_head"]) -> None:
    """Multiply a projection's head side: x -> x M for q, k and v, z -> M z for o's rows."""
    weight = layer.weight(name)
    if name in ("w_q", "w_o"):
        maps = maps.repeat_interleave(layer.n_heads // layer.n_kv_heads, 0)
    maps = maps.to(weight.device)
    bridge = isinstance(layer, BridgeLayer)
    if name == "w_o":
        layout = "m (head h) -> head h m" if bridge else "head h m -> head h m"
        new = maps @ rearrange(weight.double(), layout, head=len(maps))
        back = "head h m -> m (head h)" if bridge else "head h m -> head h m"
    else:
        layout = "(head h) m -> head m h" if bridge else "head m h -> head m h"
        new = rearrange(weight.double(), layout, head=len(maps)) @ maps
        back = "head m h -> (head h) m" if bridge else "head m h -> head m h"
        for bias in _biases(layer, name):
            turned = torch.einsum("nh,nhg->ng", bias.double().view(len(maps), -1), maps)
            bias.copy_(turned.view_as(bias))
    weight.copy_(rearrange(new, back))


def _biases(layer: Layer, name: str) -> list[Tensor]:
    if isinstance(layer, BridgeLayer):
        bias = getattr(layer.attn, name[-1]).original_component.bias
        return [] if bias is None else [bias]
    grouped = layer.cfg.n_key_value_heads is not None and name in ("w_k", "w_v")
    return [getattr(layer.attn, ("_" if grouped else "") + "b_" + name[-1].upper())]


def _parameters(layer: Layer) -> Iterator[Tensor]:
    for name in WEIGHTS:
        yield layer.weight(name)
        if name != "w_o":
            yield from _biases(layer, name)


def _has_qk_norm(layer: Layer) -> bool:
    return bool(getattr(layer.cfg, "use_qk_norm", False)) or layer.has("attn.q_norm.hook_out")


def _rotary_dim(layer: Layer) -> int:
    if not isinstance(layer, BridgeLayer):
        return layer.cfg.rotary_dim or layer.d_head
    config = layer.attn.original_component.config
    parameters = getattr(config, "rope_parameters", None) or {}
    factor = parameters.get("partial_rotary_factor") or 1.0
    return int(layer.d_head * factor)
