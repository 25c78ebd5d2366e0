"""Readings of every block on a short batch: residual stream, scores, queries, keys, mask.

A change in one block would reach later blocks through the residual stream. Writing the intact
residual stream into every block prevents this, so a single pass changes all blocks separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedConfig

from nope_probe.hooks.layers.attention import Attention, repeat_heads
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint, hooks_attached
from nope_probe.hooks.layers.model import Inputs, layers_of, position_point
from nope_probe.hooks.layers.passes import read_attention, traits_of
from nope_probe.hooks.removing.components import mean_over_positions
from nope_probe.maps.positions import NO_ROTATION, Rotation


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """The tensors of one block in a pass over a batch.

    Attributes:
        residual: the residual stream before the block.
        scores: as softmax takes them, nats.
        visible: the cells of the first sequence that are not masked.
        products: q.k of every query and key, without scale and soft cap.
        q, k: queries, and keys repeated for each query head, as they are multiplied.
        rotation: the rotation of queries and keys.
        bias: the number added to every score, nats, or None.
        sinks: whether a learned sink takes a share of each row's attention.
    """

    residual: Float[Tensor, "batch pos d_model"]
    scores: Float[Tensor, "batch head query_pos key_pos"]
    visible: Bool[Tensor, "head query_pos key_pos"]
    products: Float[Tensor, "batch head query_pos key_pos"]
    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos head d_head"]
    rotation: Rotation
    bias: Float[Tensor, "one_or_batch one_or_head query_pos key_pos"] | None = None
    sinks: bool = False


def read_layers(
    model: HookedModel,
    inputs: Inputs,
    changes: Iterable[Attachment] = (),
    residuals: Sequence[Tensor] = (),
) -> list[LayerReading]:
    """Run a batch and return the reading of every block.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: tokens, or vectors.
        changes: hooks that change something.
        residuals: the residual stream to write into each block, from an intact reading; nothing
            is written by default.
    """
    traits, entering = traits_of(model), list[Tensor]()

    def keep_residual(tensor: Tensor, hook: HookPoint) -> None:
        entering[:] = [tensor.clone()]

    def read(layer: Layer, attention: Attention) -> LayerReading:
        q, k = attention.q, repeat_heads(attention.k, attention.n_heads)
        rotary, bias = traits[layer.index].rotary, attention.bias
        return LayerReading(
            residual=entering[0],
            scores=attention.scores().cpu(),
            visible=attention.visible_per_head.cpu(),
            products=torch.einsum("bqhd,bkhd->bhqk", q, k).cpu(),
            q=q.cpu(),
            k=k.cpu(),
            rotation=rotation_of(attention, rotary),
            bias=None if bias is None else bias.cpu(),
            sinks=attention.sinks is not None,
        )

    points = [layer.point("hook_resid_pre") for layer in layers_of(model)]
    writers = [
        (point, partial(_write, residual))
        for point, residual in zip(points, residuals, strict=False)
    ]
    keepers = [(point, keep_residual) for point in points]
    with hooks_attached([*writers, *changes, *keepers]):
        return read_attention(model, inputs, read)


@dataclass(frozen=True, kw_only=True)
class ConfiguredRope:
    """The RoPE that transformers makes of a configuration for a layer, in short sequences.

    Attributes:
        kind: the `rope_type`, such as `default`, `yarn` or `proportional`.
        base: the `rope_theta`.
        frequencies: radians per position, of the pairs that turn and of those that do not.
        unscaled: these frequencies, where the `rope_type` is `default`.
    """

    kind: str
    base: float
    frequencies: Float[Tensor, " pair"]
    unscaled: Float[Tensor, " pair"]


def configured_ropes(model: HookedModel, layer: int) -> list[ConfiguredRope]:
    """Return what transformers' modules of RoPE compute for a layer from their configurations.

    A model has one module, or one for each kind of layer; a HookedTransformer has none.
    """
    original: Any = getattr(model, "original_model", None)
    if original is None:
        return []
    of_text, ropes = type(original.config.get_text_config()), []
    for module in original.modules():
        config: Any = getattr(module, "config", None)
        if type(config) is not of_text or not getattr(config, "rope_parameters", None):
            continue
        kinds = getattr(config, "layer_types", None) or []
        kind = kinds[layer] if layer < len(kinds) else ""
        buffers = dict(module.named_buffers(recurse=False))
        name = next((name for name in (f"{kind}_inv_freq", "inv_freq") if name in buffers), None)
        if name is None:
            continue
        rope = config.rope_parameters.get(kind, config.rope_parameters)
        plain = deepcopy(config)
        plain.rope_parameters.get(kind, plain.rope_parameters)["rope_type"] = "default"
        ropes.append(
            ConfiguredRope(
                kind=rope["rope_type"],
                base=float(rope["rope_theta"]),
                frequencies=_frequencies(type(module), config, name),
                unscaled=_frequencies(type(module), plain, name),
            )
        )
    return ropes


def _frequencies(module: Any, config: PreTrainedConfig, name: str) -> Float[Tensor, " pair"]:
    """Return a buffer of a module that is made anew from a configuration."""
    return getattr(module(config), name).double().cpu()


def scaled_point(layer: Layer, name: Literal["q", "k"]) -> HookPoint | None:
    """Return the hook point of a block's queries or keys before their norms; None if it has none.

    In multi-head latent attention, this point carries the unrotated part of keys, and the values.
    """
    latent = {"q": ("q_b_proj", "q_proj"), "k": ("kv_b_proj",)}[name]
    names = [*(f"attn.{part}.hook_out" for part in (*latent, name)), f"attn.hook_{name}"]
    return next((layer.point(point) for point in names if layer.has(point)), None)


def hooks_scaling(
    model: HookedModel, name: Literal["q", "k"], factor: float, *, first_head: bool = False
) -> Iterator[Attachment]:
    """Return the hooks that multiply queries or keys in every block, of all heads or the first."""

    def scale(n_heads: int, tensor: Tensor, hook: HookPoint) -> Tensor:
        if not first_head:
            return factor * tensor
        scaled = tensor.clone()
        heads = scaled if scaled.ndim == 4 else scaled.unflatten(-1, (n_heads, -1))
        heads[:, :, 0] *= factor
        return scaled

    for layer in layers_of(model):
        point = scaled_point(layer, name)
        if point is not None:
            yield point, partial(scale, layer.n_heads if name == "q" else layer.n_kv_heads)


def hooks_without_learned_positions(model: HookedModel) -> Iterator[Attachment]:
    """Return the hook that replaces learned position embeddings by their mean, if there are any."""
    point = position_point(model)
    if point is not None:
        yield point, mean_over_positions


def _write(residual: Tensor, tensor: Tensor, hook: HookPoint) -> Tensor:
    return residual


def rotation_of(attention: Attention, rotary: Rotation | None) -> Rotation:
    """Return a block's rotation in a pass."""
    if rotary is None:
        return NO_ROTATION
    if attention.angles is None or rotary.columns is None:
        return rotary
    return rotary.at(attention.angles)
