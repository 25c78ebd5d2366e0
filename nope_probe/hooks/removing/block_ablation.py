"""The removals in one block, and which are in effect on which model.

A `BlockAblation` says what has to be read of a forward pass, and what is written. What a pass does
depends on the ablation in effect, and on whether others have hooks where it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.components import LOCAL, OF_LENGTH, Ablation, Projection
from nope_probe.hooks.layers.attached_hooks import HookGroup, PlacedHook, first, last
from nope_probe.hooks.layers.attention import check_no_cache, unmasked
from nope_probe.hooks.layers.base_layer import Heads, Keys, Layer, Values, Vectors, Visible
from nope_probe.hooks.layers.protocols import HookedModel, HookPoint
from nope_probe.hooks.removing.block_removal import BlockRemoval, discarded_hooks
from nope_probe.hooks.removing.edited_weights import norm_hooks
from nope_probe.hooks.removing.rebuilt_scores import ScoreBuilder, real_positions


class BlockAblation:
    """Removes components from one block, for as long as its hooks are attached.

    Args:
        layer: the block.
        removal: what is removed from it.
    """

    def __init__(self, layer: Layer, removal: BlockRemoval) -> None:
        self.layer, self.removal = layer, removal
        self.builder = ScoreBuilder(layer, removal)
        self.inputs: list[Tensor] = []
        self.read: dict[str, Tensor] = {}

    def group(self) -> HookGroup:
        """Return the block's hooks."""
        hooks = list(self._hooks())
        hooks += discarded_hooks(self.layer, self.removal, hooks)
        return HookGroup(module=self.layer.block, hooks=hooks, start=self.reset)

    def _hooks(self) -> Iterator[PlacedHook]:
        point, remove = self.layer.point, self.removal.components
        if "norms" in remove:
            yield from norm_hooks(self.layer)
        if remove & {"w_q", "w_k", "w_v"}:
            yield last(point(self.layer.norm_point("ln1")), self.read_input)
        if "w_q" in remove:
            yield first(point("attn.hook_q"), self.write_q)
        if self.removal.rope is not None and self.removal.heads is None:
            yield from self.layer.hooks_without_rope(self.removal.rope)
        if not remove <= LOCAL:
            yield first(point("attn.hook_attn_scores"), self.check_sequences)
        if self.removal.rebuilds_scores:
            yield from self.builder.hooks()
            yield first(point("attn.hook_attn_scores"), self.write_scores)
        yield from self._hooks_after_scores()
        yield last(point("hook_resid_post"), self.drop)

    def _hooks_after_scores(self) -> Iterator[PlacedHook]:
        point, remove = self.layer.point, self.removal.components
        if "w_v" in remove:
            yield last(point("attn.hook_pattern"), self.read_pattern)
            yield first(point("attn.hook_z"), self.write_z)
        if "w_o" in remove:
            yield last(point("attn.hook_z"), self.read_z)
            yield first(point(self.layer.attn_out_point), self.write_attn_out)
        if "mlp" in remove:
            yield first(point("hook_mlp_out"), zeros)

    def read_input(self, tensor: Tensor, hook: HookPoint) -> None:
        self.inputs.append(tensor)

    def read_pattern(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read["pattern"] = tensor

    def read_z(self, tensor: Tensor, hook: HookPoint) -> None:
        self.read["z"] = tensor

    def check_sequences(self, tensor: Tensor, hook: HookPoint) -> None:
        """Check that a pass is over whole sequences, unpadded where their length matters.

        Raises:
            ValueError: if keys come from a cache, or for padding which the removal would count.
        """
        check_no_cache(*tensor.shape[-2:])
        names = sorted(self.removal.components & OF_LENGTH)
        if names and not real_positions(unmasked(tensor)).all():
            raise ValueError(
                f"removing {' and '.join(names)} depends on the length of the sequences, which "
                "padding changes: pass sequences of one length, without padding"
            )

    def write_q(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_Q; the model then norms and rotates it."""
        new = self._outputs("w_q").to(tensor.dtype)
        if self.removal.heads is None:
            return new  # the model's own may be empty: fused attention leaves it out
        return self.removal.in_heads(new, tensor, dim=2)

    def write_scores(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the scores by rebuilt ones."""
        new_keys = self._outputs("w_k") if "w_k" in self.removal.components else None
        return self.builder.write(tensor, new_keys)

    def edit_product(
        self, k: Keys, v: Values, visible: Visible
    ) -> tuple[
        Float[Tensor, "batch pos new_kv_head d_head"],
        Float[Tensor, "batch pos new_value_head d_head"],
        Visible,
    ]:
        """Write the removals to what fused attention is computed from, which has no hook points.

        Args:
            k: keys, normed and rotated.
            v: values.
            visible: which keys each query attends to.
        """
        remove = self.removal.components
        if "w_k" in remove:
            k = self.builder.keys(self._outputs("w_k")).to(k.dtype)
        if "w_v" in remove:
            v = self._outputs("w_v").to(v.dtype)
        return k, v, self.builder.visible(visible)

    def write_z(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_V, weighted by attention; fused attention has done so already."""
        if "pattern" not in self.read:
            return tensor
        pattern = self.read.pop("pattern")  # the largest tensor of a block: not kept for the next
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, self._outputs("w_v").to(pattern.dtype))
        return self.removal.in_heads(z.to(tensor.dtype), tensor, dim=2)

    def write_attn_out(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_O; where some heads keep it, the bias stays."""
        z, heads = self.read["z"], self.removal.heads
        if heads is None:
            all_heads = range(self.layer.n_heads)
            return self.removal.replaced["w_o"].summed(z, all_heads).to(tensor.dtype)
        weight = self.layer.weight_per_head("w_o")[heads].to(z)
        own = torch.einsum("bphd,hdm->bpm", z[:, :, heads], weight)
        return (tensor - own + self.removal.replaced["w_o"].summed(z, heads)).to(tensor.dtype)

    def reset(self) -> None:
        """Drop what was read of a pass."""
        self.inputs.clear()
        self.read.clear()
        self.builder.reader.reset()

    def drop(self, tensor: Tensor, hook: HookPoint) -> None:
        """Drop what was read: the queries and keys of all blocks are gigabytes."""
        self.reset()

    def _outputs(self, name: Projection) -> Heads:
        """Return the output of the replacement of W_Q, W_K or W_V."""
        return self.removal.replaced[name].outputs(self._input(name))

    def _input(self, name: Projection) -> Vectors:
        # A HookedTransformer norms the inputs of W_Q, W_K and W_V one after the other.
        one_each = len(self.inputs) == 3
        which = {"w_q": 0, "w_k": 1}.get(name, 2) if one_each else -1
        return self.layer.norm_output("ln1", self.inputs[which])


def zeros(tensor: Tensor, hook: HookPoint) -> Tensor:
    """Replace a tensor by zeros."""
    return torch.zeros_like(tensor)


def mean_over_positions(
    tensor: Float[Tensor, "batch pos d_model"], hook: HookPoint
) -> Float[Tensor, "batch pos d_model"]:
    """Replace each position's vector by the mean over positions."""
    return tensor.mean(-2, keepdim=True).expand_as(tensor).clone()


BlockAblations = Mapping[int, BlockAblation]  # by the block's number


@dataclass(frozen=True, kw_only=True, eq=False)
class ActiveAblation:
    """An ablation that is in effect.

    Attributes:
        ablation: what is removed.
        calibration: the gains and means of its replacements, compared by identity.
        blocks: the removals in each block.
        groups: the hooks that are attached.
    """

    ablation: Ablation
    calibration: Hashable
    blocks: BlockAblations
    groups: Sequence[HookGroup]


ABLATED: WeakKeyDictionary[HookedModel, ActiveAblation] = WeakKeyDictionary()


def block_ablations(model: HookedModel) -> BlockAblations:
    """Return the removals that are in effect in each block; none outside `ablated`."""
    active = ABLATED.get(model)
    return {} if active is None else active.blocks


def removed_before(model: HookedModel, depth: int) -> tuple[Hashable, ...]:
    """Return what identifies the removals before a block; empty where nothing is removed there.

    Two passes over the same tokens enter the block with equal residual streams if this is equal.

    Args:
        model: the model, ablated or not.
        depth: the number of the block.
    """
    active = ABLATED.get(model)
    if active is None:
        return ()
    ablation, removals = active.ablation, []
    for index, each in sorted(active.blocks.items()):
        if index < depth:
            heads = each.removal.heads
            removals.append((index, None if heads is None else tuple(heads)))
    embeds = "pos_embed" in ablation.components
    if not (removals or embeds) or not ablation.components:
        return ()
    names = tuple(sorted(ablation.components))
    how = ablation.replacement, ablation.gain, ablation.seed, ablation.prefix
    return (names, *how, active.calibration, *removals)


def has_foreign_hooks(model: HookedModel, points: Iterable[HookPoint]) -> bool:
    """Return whether hook points have other hooks than those of an ablation in effect."""
    active = ABLATED.get(model)
    groups = () if active is None else active.groups
    ours = Counter(id(placed.point) for group in groups for placed in group.hooks)
    return any(len(point.fwd_hooks) != ours[id(point)] for point in points)
