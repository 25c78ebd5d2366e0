"""The removals in one block, and the ablations in effect on each model.

A `BlockAblation` reads tensors of a forward pass and writes their replacements. The other
functions compare ablations, so that passes may share residual streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from nope_probe.hooks.layers.attention import Attention, Mask, Visible, repeat_heads
from nope_probe.hooks.layers.base_layer import NormName, Vectors
from nope_probe.hooks.layers.hook_points import (
    HookedModel,
    HookGroup,
    HookPoint,
    PlacedHook,
    first,
    last,
    restores_places,
)
from nope_probe.hooks.layers.model import modules_of
from nope_probe.hooks.layers.rotation import RemovedPairs
from nope_probe.hooks.layers.threads import used_alone
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import (
    Calibration,
    Place,
    ReplacedWeight,
)
from nope_probe.hooks.removing.targets import Target
from nope_probe.removal import Condition, Projection

NORMS: tuple[NormName, ...] = get_args(NormName)


class BlockAblation:
    """Removes components from one block, for as long as its hooks are attached.

    Args:
        target: the block, the query heads and the rotary pairs that lose the components.
        ablation: the removals.
        calibration: the result of `calibrate`, if the ablation needs it.
    """

    def __init__(self, target: Target, ablation: Ablation, calibration: Calibration | None) -> None:
        self.layer, self.heads, self.rope = target.layer, target.heads, target.rope
        self.components, self.prefix = ablation.condition, ablation.prefix
        self.replaced: dict[Projection, ReplacedWeight] = {
            name: ablation.stand_in.make(
                Place(
                    layer=target.layer,
                    name=name,
                    replacement=str(ablation.replacement),
                    gain=ablation.scaling,
                    seed=ablation.seed,
                    calibration=calibration,
                    heads=target.heads,
                )
            )
            for name in ablation.condition.weights
        }
        self.inputs: list[Tensor] = []
        self.z: Tensor | None = None

    def group(self) -> HookGroup:
        """Return the block's hooks."""
        return HookGroup(self.layer.block, list(self._hooks()))

    def _hooks(self) -> Iterator[PlacedHook]:
        point, remove = self.layer.point, self.components
        yield first(point("hook_resid_pre"), self.drop)  # tensors of a pass that ended early
        if "norms" in remove:
            for norm in NORMS:
                if self.layer.has(f"{norm}.hook_normalized"):
                    yield from self.layer.hooks_without_norm_weight(norm)
        if remove & {"w_q", "w_k", "w_v"}:
            yield last(point(self.layer.norm_point("ln1")), self.read_input)
        names: tuple[Projection, ...] = ("w_q", "w_k", "w_v")
        for name in names:
            if name in remove:
                yield first(point(self.layer.output_point(name)), partial(self.write_heads, name))
        if "w_o" in remove:
            yield last(point("attn.hook_z"), self.read_z)
            yield first(point(self.layer.attn_out_point), self.write_attn_out)
        if "mlp" in remove and self.layer.has("hook_mlp_out"):
            yield first(point("hook_mlp_out"), zeros)
        yield last(point("hook_resid_post"), self.drop)

    def read_input(self, tensor: Tensor, hook: HookPoint) -> None:
        self.inputs.append(tensor)

    def read_z(self, tensor: Tensor, hook: HookPoint) -> None:
        self.z = self.layer.by_head(tensor)

    def write_heads(self, name: Projection, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_Q, W_K or W_V, one head per query head.

        The model then norms and rotates the new output.
        """
        new = self.replaced[name].outputs(self._input(name)).to(tensor.dtype)
        return self._in_heads(new, repeat_heads(tensor, self.layer.n_heads), dim=2)

    def write_attn_out(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        """Replace the output of W_O; if some heads keep W_O, its bias stays."""
        z, heads = self.z, self.heads
        assert z is not None
        if heads is None:
            all_heads = range(self.layer.n_heads)
            return self.replaced["w_o"].summed(z, all_heads).to(tensor.dtype)
        weight = self.layer.weight_per_head("w_o")[heads].to(z)
        own = torch.einsum("bphd,hdm->bpm", z[:, :, heads], weight)
        return (tensor - own + self.replaced["w_o"].summed(z, heads)).to(tensor.dtype)

    def edit(self, attention: Attention) -> Attention:
        """Return attention without mask, window, ALiBi, sinks, or the RoPE of some heads.

        Raises:
            ValueError: if keys come from a cache, or for padding that the removal would count.
        """
        remove, mask = self.components, attention.mask
        if not all(name.row.by_token for name in remove):
            check_sequences(attention, remove)
        if self.rope is not None and self.heads is not None:
            attention = self._without_rope(attention, self.rope)
        if remove & {"mask", "window"}:
            mask = self._mask_without(mask, attention.n_heads)
        bias, sinks = attention.bias, attention.sinks
        if bias is not None and "alibi" in remove:
            bias = self._in_heads(torch.zeros_like(bias), bias, dim=1)
        if sinks is not None and "sink" in remove:
            sinks = self._in_heads(torch.full_like(sinks, -torch.inf), sinks, dim=0)
        return replace(attention, mask=mask, bias=bias, sinks=sinks)

    def _mask_without(self, mask: Mask, n_heads: int) -> Mask:
        """Return a mask without mask or window in the heads that lose them."""
        new = mask.without(self.components, self.prefix)
        if self.heads is None:
            return new

        def sees(query: Tensor, key: Tensor) -> Visible:
            changed, kept = (
                rule.sees(query, key).expand(-1, n_heads, -1, -1) for rule in (new, mask)
            )
            return self._in_heads(changed, kept, dim=1)

        return replace(mask, sees=sees, known=None)

    def _without_rope(self, attention: Attention, rope: RemovedPairs) -> Attention:
        """Return attention with the removed pairs as at position 0 in the heads that lose them."""
        assert attention.angles is not None
        angles, q = attention.angles, attention.q
        k = repeat_heads(attention.k, attention.n_heads)
        q, k = (self._in_heads(rope.turned_back(x, angles), x, dim=2) for x in (q, k))
        return replace(attention, q=q, k=k)

    def drop(self, tensor: Tensor, hook: HookPoint) -> None:
        """Drop the tensors of a pass, because inputs and values of all blocks are gigabytes."""
        self.inputs.clear()
        self.z = None

    def _in_heads(
        self, new: Shaped[Tensor, "*shape"], old: Shaped[Tensor, "*shape"], dim: int
    ) -> Shaped[Tensor, "*shape"]:
        """Return the new tensor in the heads that lose components, and the old tensor elsewhere."""
        if self.heads is None:
            return new
        mixed = old.clone()
        mixed.movedim(dim, 0)[self.heads] = new.movedim(dim, 0)[self.heads].to(old.dtype)
        return mixed

    def _input(self, name: Projection) -> Vectors:
        # A HookedTransformer norms the inputs of W_Q, W_K and W_V one after the other.
        one_each = len(self.inputs) == 3
        which = {"w_q": 0, "w_k": 1}.get(name, 2) if one_each else -1
        return self.layer.norm_output("ln1", self.inputs[which])


def check_sequences(attention: Attention, remove: Condition) -> None:
    """Check that a pass is over whole sequences, unpadded where their length matters.

    Raises:
        ValueError: if keys come from a cache, or for padding that the removal would count.
    """
    n_queries, n_keys = attention.mask.n_queries, attention.mask.n_keys
    if n_queries != n_keys:
        raise ValueError(
            f"{n_keys} keys for {n_queries} queries: in this ablation a position depends on all "
            "others, so that no cache of keys and values holds; pass whole sequences"
        )
    names = sorted(name for name in remove if name.of_length)
    if names and not attention.mask.real.all():
        raise ValueError(
            f"removing {' and '.join(names)} depends on the length of the sequences, which "
            "padding changes: pass sequences of one length, without padding"
        )


def zeros(tensor: Tensor, hook: HookPoint) -> Tensor:
    """Replace a tensor by zeros."""
    return torch.zeros_like(tensor)


def mean_over_positions(
    tensor: Float[Tensor, "batch pos d_model"], hook: HookPoint
) -> Float[Tensor, "batch pos d_model"]:
    """Replace each position's vector by the mean over positions."""
    return tensor.mean(-2, keepdim=True).expand_as(tensor).clone()


@dataclass(frozen=True, kw_only=True, eq=False)
class ActiveAblation:
    """An ablation that is in effect.

    Attributes:
        ablation: the removals.
        calibration: the gains and means of its replacements, compared by identity.
        heads: the query heads that lose components, None for all, by the number of the block; a
            writer's position is lost in its block, or in the only block that loses it.
        groups: the hooks that are attached.
    """

    ablation: Ablation
    calibration: Hashable
    heads: Mapping[int, list[int] | None]
    groups: Sequence[HookGroup]


ABLATED: WeakKeyDictionary[HookedModel, ActiveAblation] = WeakKeyDictionary()


def is_ablated(model: HookedModel) -> bool:
    """Return whether a model is ablated in this thread; ablations of other threads are waited for.

    Nobody else ablates the model while this thread uses it alone.
    """
    with used_alone(model):
        return model in ABLATED


def foreign_hooks(model: HookedModel) -> list[str]:
    """Return the names of modules with hooks that neither an ablation nor a library has added."""
    active = ABLATED.get(model)
    groups = () if active is None else active.groups
    placed_on = Counter(id(placed.point) for group in groups for placed in group.hooks)

    def has_others(module: nn.Module) -> bool:
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if isinstance(module, HookPoint):
            return len(hooks) != placed_on[id(module)]
        return not all(restores_places(hook) or _is_of_the_libraries(hook) for hook in hooks)

    return [name for name, module in modules_of(model).items() if has_others(module)]


def _is_of_the_libraries(hook: object) -> bool:
    # After a call that asked for attentions or hidden states, transformers leaves hooks in place.
    # They record nothing until such a call comes again.
    known = ("transformer_lens.", "transformers.utils.output_capturing")
    return str(getattr(hook, "__module__", "")).startswith(known)
