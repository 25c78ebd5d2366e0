"""Readings of blocks and heads on a short batch: scores, queries, keys, attention to chosen keys.

A change in one block would reach later blocks through the residual stream. Writing the intact
residual stream into every block prevents this, so a single pass changes all blocks separately.
Attention to a chosen key per query is read without a map of n x n weights per head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention, repeat_heads
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint, hooks_attached
from nope_probe.hooks.layers.model import (
    Inputs,
    layers_of,
    position_point,
    read_attention,
    traits_of,
)
from nope_probe.hooks.removing.components import mean_over_positions
from nope_probe.maps.rotation import NO_ROTATION, Rotation


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
    bias: Float[Tensor, "one_or_batch head query_pos key_pos"] | None = None
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


def rotation_of(attention: Attention, rotary: Rotation | None) -> Rotation:
    """Return a block's rotation in a pass."""
    if rotary is None:
        return NO_ROTATION
    if attention.angles is None or rotary.columns is None:
        return rotary
    return rotary.at(attention.angles)


def window_hides(model: HookedModel, inputs: Inputs, n_layers: int) -> bool:
    """Return whether one of the first blocks hides an earlier key of the first sequence."""

    def hides(layer: Layer, attention: Attention) -> bool:
        return bool((~attention.visible_to_all).tril().any())

    return any(read_attention(model, inputs, hides, n_layers=n_layers))


def read_rotations(model: HookedModel, inputs: Inputs, n_layers: int) -> list[Rotation]:
    """Return the rotation of each of the first blocks in a pass, at positions 0 and 1.

    All positions are run, because some models' angles depend on the number of positions.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: tokens, or vectors.
        n_layers: how many blocks are read.
    """
    traits = traits_of(model)

    def read(layer: Layer, attention: Attention) -> Rotation:
        return rotation_of(attention, traits[layer.index].rotary).among(slice(2))

    return read_attention(model, inputs, read, n_layers=n_layers)


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


ROWS = 128  # queries whose scores are in memory at once
RowWeights = Float[Tensor, "batch head query_pos which"]


def weights_on(attention: Attention, keys: Int[Tensor, "which query_pos"]) -> RowWeights:
    """Return each query's attention to chosen keys, on the CPU.

    Attention is the softmax of the scores, or what hooks on `hook_pattern` made of it: a learned
    sink outside the scores (as in gpt-oss) is left out.
    """
    n_pos = attention.q.shape[1]
    blocks = [slice(start, start + ROWS) for start in range(0, n_pos, ROWS)]
    weights = [_weights_of_rows(attention, rows, keys[:, rows]) for rows in blocks]
    return torch.cat(weights, 2).cpu()


def keys_before(n_pos: int, distance: int) -> Int[Tensor, " query_pos"]:
    """Return the key at a distance before each query; 0 for queries without such a key."""
    return (torch.arange(n_pos) - distance).clamp_min(0)


def _weights_of_rows(
    attention: Attention, rows: slice, keys: Int[Tensor, "which query_pos"]
) -> RowWeights:
    hooked = attention.hooked_weights(rows)
    if hooked is None:
        return weights_at(attention.masked_scores(rows), keys)
    return hooked.gather(-1, keys.T.to(hooked.device).expand(*hooked.shape[:3], -1))


def weights_at(
    scores: Float[Tensor, "batch head query_pos key_pos"], keys: Int[Tensor, "which query_pos"]
) -> RowWeights:
    """Return exp(s - logsumexp(s)) of chosen cells of scores, in float32 or better."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    where = keys.T.to(scores.device).expand(*scores.shape[:3], -1)
    return (scores.gather(-1, where) - scores.logsumexp(-1, keepdim=True)).exp()
