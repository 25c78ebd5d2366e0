"""Whether a model's blocks can compute attention without scores: seen on a short batch."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nope_probe.hooks.active import block_ablations, has_foreign_hooks
from nope_probe.hooks.attention import relative_error, unmasked
from nope_probe.hooks.base_layer import Heads, Keys, Layer, Visible
from nope_probe.hooks.forward import (
    hooks_attached,
    hooks_detached,
    run_forward,
)
from nope_probe.hooks.fused import FusedAttention, Read, fused
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs
from nope_probe.hooks.protocols import Hook, HookedModel, HookPoint

N_SEQS, N_POS = 2, 48
_SEEN: WeakKeyDictionary[HookedModel, bool] = WeakKeyDictionary()


def can_fuse(model: HookedModel, inputs: Inputs) -> bool:
    """Return whether fused attention may stand for a model's own.

    It may if no other hook reads or writes what it leaves out, and if on a short batch (run once
    for each model, without any hooks) q.k gives the scores of each block, with the model's own mask
    and the output of the last block.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: sequences, of which the start of the first ones is run.
    """
    blocks = layers_of(model)
    removals = block_ablations(model).values()
    if any(each.removal.heads is not None for each in removals):
        return False  # heads may differ in their masks
    if has_foreign_hooks(model, (p for layer in blocks for p in layer.unfused_points())):
        return False
    if not all(layer.has_plain_attention for layer in blocks):
        return False  # an option of TransformerLens, which may be set and unset at any time
    if model not in _SEEN:
        _SEEN[model] = _is_equal(model, blocks, inputs[:N_SEQS, :N_POS])
    return _SEEN[model]


def _is_equal(model: HookedModel, blocks: Sequence[Layer], batch: Inputs) -> bool:
    """Return whether a batch gives the same scores, masks and outputs both ways."""
    scores: list[Tensor] = []
    outputs: list[Tensor] = []
    same: list[bool] = []
    readers = [_comparison(layer, scores, same) for layer in blocks]
    points = [layer.point("attn.hook_attn_scores") for layer in blocks]
    end = blocks[-1].point("hook_resid_post")
    with torch.inference_mode(), hooks_detached(model), hooks_attached([(end, _keep(outputs))]):
        with hooks_attached((point, _keep(scores)) for point in points):
            run_forward(model, batch)
        with fused(
            FusedAttention(layer, [read]) for layer, read in zip(blocks, readers, strict=True)
        ):
            run_forward(model, batch)
    return all(same) and _is_close(outputs[1], outputs[0])


def _comparison(layer: Layer, scores: Sequence[Tensor], same: list[bool]) -> Read:
    def read(q: Heads, k: Keys, visible: Visible) -> None:
        own = scores[layer.index]
        cells = layer.scores(q, k)[..., visible], own[..., visible]
        same.append(torch.equal(visible, unmasked(own[0, 0])) and _is_close(*cells))

    return read


def _is_close(values: Tensor, expected: Tensor) -> bool:
    return relative_error(values, expected) <= max(1e-4, 8 * torch.finfo(values.dtype).eps)


def _keep(tensors: list[Tensor]) -> Hook:
    def keep(tensor: Tensor, hook: HookPoint) -> None:
        tensors.append(tensor)

    return keep
