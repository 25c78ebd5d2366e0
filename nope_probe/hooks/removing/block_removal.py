"""What is removed from one block, and the tensors that this leaves without effect.

No other hook may change such a tensor unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.components import Projection
from nope_probe.hooks.layers.attached_hooks import PlacedHook, first, last
from nope_probe.hooks.layers.attention import RemovedPairs
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.protocols import HookPoint
from nope_probe.hooks.removing.replacements import ReplacedWeight


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockRemoval:
    """What is removed from one block.

    Attributes:
        components: components, and `norms`.
        replaced: the replacement of each weight that is removed.
        rope: the rotary pairs that are removed, if any are.
        heads: the query heads that lose the components; None for all.
        prefix: how many first positions lose the mask among themselves; None for all positions.
    """

    components: frozenset[str]
    replaced: Mapping[Projection, ReplacedWeight] = field(default_factory=dict)
    rope: RemovedPairs | None = None
    heads: list[int] | None = None
    prefix: int | None = None

    @property
    def rebuilds_scores(self) -> bool:
        """Whether the block's scores are rebuilt from queries and keys."""
        per_head_rope = self.rope is not None and self.heads is not None
        return per_head_rope or bool(self.components & {"mask", "w_k", "alibi"})

    def in_heads(
        self, new: Float[Tensor, "*shape"], old: Float[Tensor, "*shape"], dim: int
    ) -> Float[Tensor, "*shape"]:
        """Return the new tensor in the heads that lose the components, and the old in the rest."""
        if self.heads is None:
            return new
        mixed = old.clone()
        mixed.movedim(dim, 0)[self.heads] = new.movedim(dim, 0)[self.heads].to(old.dtype)
        return mixed


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
