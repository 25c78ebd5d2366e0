"""Fused attention: forward passes that compute no scores, where nobody reads or writes them.

The mean score map needs q and k alone, and what follows a block needs z: PyTorch's
`scaled_dot_product_attention` computes it without a tensor of n x n cells per head. Whether a
model's blocks allow it is seen on a short batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nope_probe.components import Projection
from nope_probe.hooks.layers.attached_hooks import hooks_attached, hooks_detached
from nope_probe.hooks.layers.attention import relative_error, repeat_heads, unmasked
from nope_probe.hooks.layers.base_layer import Heads, Keys, Layer, Values, Visible
from nope_probe.hooks.layers.model import Inputs, StopForward, layers_of, run_forward
from nope_probe.hooks.layers.protocols import Hook, HookedModel, HookPoint
from nope_probe.hooks.removing.block_ablation import (
    BlockAblation,
    block_ablations,
    has_foreign_hooks,
)

Read = Callable[[Heads, Keys, Visible], None]


class FusedAttention:
    """Computes one block's z from q, k and v, and shows q and k to those who read them.

    Args:
        layer: the block.
        read: called in each pass with q and k as they are multiplied, and with the cells that are
            not masked.
        ablation: the removals in this block, if there are any.
        is_last: whether a pass ends once q and k were read.
    """

    def __init__(
        self,
        layer: Layer,
        read: Sequence[Read],
        ablation: BlockAblation | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        self.layer, self.readers, self.ablation, self.is_last = layer, read, ablation, is_last

    @property
    def replaced(self) -> frozenset[Projection]:
        """The projections whose output a hook of the ablation writes."""
        return frozenset(() if self.ablation is None else self.ablation.removal.replaced)

    def __call__(self, q: Heads, k: Keys, v: Values, visible: Visible) -> Heads:
        """Return the values weighted by attention.

        Raises:
            StopForward: if the pass ends here.
        """
        if self.ablation is not None:
            k, v, visible = self.ablation.edit_product(k, v, visible)
        for read in self.readers:
            read(q, k, visible)
        if self.is_last:
            raise StopForward
        return attend(q, k, v, visible, self.layer.scale)


def attend(q: Heads, k: Keys, v: Values, visible: Visible, scale: float) -> Heads:
    """Return softmax(scale q.k) v without a tensor of scores.

    Args:
        q: queries.
        k: keys, one per query head or grouped.
        v: values, one per query head or grouped.
        visible: which keys each query attends to.
        scale: the factor between q.k and a score.
    """
    dtype = v.dtype
    if k.shape[2] != v.shape[2]:  # a removed W_K or W_V leaves a head per query head
        k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
    q, k, v = (
        rearrange(x, "batch pos head d_head -> batch head pos d_head")
        for x in (q, k, v.to(q.dtype))
    )
    causal = torch.equal(visible, torch.ones_like(visible).tril())
    mask = None if causal or bool(visible.all()) else visible
    z = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
    )
    return rearrange(z, "batch head pos d_head -> batch pos head d_head").to(dtype)


@contextmanager
def fused(attentions: Iterable[FusedAttention]) -> Iterator[None]:
    """Let blocks compute attention without scores for as long as the context lasts.

    `hook_attn_scores` and `hook_pattern` do not fire; every other hook point of attention does.
    """
    modules: list[nn.Module] = []
    try:
        for each in attentions:
            modules.append(each.layer.attn)
            # In the instance's dict: a bridge's own __setattr__ would pass it on to the HF module.
            each.layer.attn.__dict__["forward"] = each.layer.fused_forward(each, each.replaced)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


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
