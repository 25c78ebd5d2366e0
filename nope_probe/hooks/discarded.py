"""Tensors that a removal leaves without effect: no other hook may change them unnoticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nope_probe.hooks.base_layer import Layer
from nope_probe.hooks.block_removal import BlockRemoval
from nope_probe.hooks.placed import PlacedHook, first, last
from nope_probe.hooks.protocols import HookPoint

# The hook points whose tensors have no effect once a component is removed.
DISCARDED: dict[str, tuple[str, ...]] = {
    "w_k": ("attn.hook_k", "attn.hook_rot_k", "attn.k_norm.hook_out"),
    "w_v": ("attn.hook_v",),
    "w_o": ("attn.hook_result",),
    "mlp": ("hook_mlp_in", "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post"),
}


def discarded_hooks(
    layer: Layer, removal: BlockRemoval, ours: Sequence[PlacedHook]
) -> Iterator[PlacedHook]:
    """Return hooks that check that no other hook changes a tensor which a removal discards.

    With named heads there is none: the other heads still use it.

    Args:
        layer: the block.
        removal: what is removed from it.
        ours: the removal's own hooks.
    """
    if removal.heads is not None:
        return
    for component, names in DISCARDED.items():
        for name in names:
            if component in removal.components and layer.has(name):
                point = layer.point(name)
                n_ours = 2 + sum(each.point is point for each in ours)
                check = _UnchangedCheck(layer, name, component, n_ours)
                yield first(point, check.keep)
                yield last(point, check.compare)


class _UnchangedCheck:
    def __init__(self, layer: Layer, name: str, component: str, n_ours: int) -> None:
        self.layer, self.name, self.component, self.n_ours = layer, name, component, n_ours
        self.kept: Tensor | None = None

    def keep(self, tensor: Tensor, hook: HookPoint) -> None:
        if len(self.layer.point(self.name).fwd_hooks) > self.n_ours:
            self.kept = tensor.clone()  # other hooks may change it in place

    def compare(self, tensor: Tensor, hook: HookPoint) -> None:
        kept, self.kept = self.kept, None
        if kept is None or torch.equal(tensor, kept):
            return
        if torch.allclose(tensor, kept, rtol=0, atol=0, equal_nan=True):
            return  # NaN, which equals nothing
        raise ValueError(
            f"a hook changes {self.name} of L{self.layer.index}, which has no effect while "
            f"{self.component} is removed"
        )
