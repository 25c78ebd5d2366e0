"""What a model has that can be removed, and how it is removed: a class for each row of `REMOVABLE`.

A class says which models have its component, and which blocks can lose it. An object removes the
component from one block: it attaches hooks, and edits the block's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import Attention, AttentionMask, Visible, repeat_heads
from nope_probe.hooks.layers.base_layer import Layer, NormName, find_point
from nope_probe.hooks.layers.hook_points import HookedModel, HookPoint, PlacedHook, first, last
from nope_probe.hooks.layers.model import blocks_of, layers_of, position_point
from nope_probe.hooks.layers.passes import traits_of
from nope_probe.hooks.layers.tap import RemovedPairs
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.hooks.removing.weights import Calibration, Place
from nope_probe.removal import COMPONENTS, REMOVABLE, Component, Condition, Projection

REMOVALS: dict[str, type[Removal]] = {}  # by the names of the rows


@dataclass(eq=False)
class Removal:
    """The removal of a component from one block, for as long as its hooks are attached.

    Attributes:
        model: the block's model.
        layer: the block.
        heads: the query heads that lose the component; None for all.
        ablation: all removals.
        kind: the name of its row.
        trait: the name among `Traits` of what a block with the component has.
        straightens: the rotary pairs that stay as at position 0 in every head.

    Raises:
        UserError: saying why the block cannot lose the component.
    """

    model: HookedModel
    layer: Layer
    heads: list[int] | None
    ablation: Ablation
    straightens: RemovedPairs | None = field(default=None, init=False)
    kind: ClassVar[str]
    trait: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check that the block can lose the component."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            REMOVALS[cls.kind] = cls

    @classmethod
    def is_in(cls, model: HookedModel) -> bool:
        """Return whether a model has the component, by default as the traits of its blocks say."""
        known = (getattr(traits, cls.trait) for traits in traits_of(model).values())
        return not cls.trait or any(known)

    @classmethod
    def hooks_outside(cls, model: HookedModel, ablation: Ablation) -> Iterator[PlacedHook]:
        """Yield the hooks outside of the blocks that attend."""
        yield from ()

    def hooks(self, calibration: Calibration) -> Iterator[PlacedHook]:
        """Yield the block's hooks, given the result of `calibrate` that the ablation needs."""
        yield from ()

    def edit(self, attention: Attention) -> Attention:
        """Return the block's attention without the component."""
        return attention

    def in_heads(
        self, new: Shaped[Tensor, "*shape"], old: Shaped[Tensor, "*shape"], dim: int
    ) -> Shaped[Tensor, "*shape"]:
        """Return the new tensor in the heads that lose the component, else the old one."""
        if self.heads is None:
            return new
        mixed = old.clone()
        mixed.movedim(dim, 0)[self.heads] = new.movedim(dim, 0)[self.heads].to(old.dtype)
        return mixed

    def filled(
        self, tensor: Float[Tensor, "*shape"] | None, value: float, dim: int
    ) -> Float[Tensor, "*shape"] | None:
        """Return a tensor with a value in the heads that lose the component, if there is one."""
        if tensor is None:
            return None
        return self.in_heads(torch.full_like(tensor, value), tensor, dim)


class OfMask(Removal):
    """The mask of attention changes."""

    def masked(self, attention: Attention, new: AttentionMask) -> Attention:
        """Return attention with a new mask in the heads that lose the component."""
        mask, n_heads = attention.mask, attention.n_heads
        if self.heads is None:
            return replace(attention, mask=new)

        def sees(query: Tensor, key: Tensor) -> Visible:
            changed, kept = (
                rule.sees(query, key).expand(-1, n_heads, -1, -1) for rule in (new, mask)
            )
            return self.in_heads(changed, kept, dim=1)

        return replace(attention, mask=replace(mask, sees=sees, known=None))


class Mask(OfMask):
    """Every query attends to all keys that padding and the window leave."""

    kind = "mask"

    @classmethod
    def is_in(cls, model: HookedModel) -> bool:
        return model.cfg.attention_dir != "bidirectional"

    def edit(self, attention: Attention) -> Attention:
        return self.masked(attention, attention.mask.both_ways(self.ablation.prefix))


class Window(OfMask):
    """Every query attends to all earlier keys."""

    kind = trait = "window"

    def edit(self, attention: Attention) -> Attention:
        return self.masked(attention, attention.mask.without_window())


class Rope(Removal):
    """Queries and keys are rotated as at position 0, in all pairs or in some bands."""

    kind, trait = "rope", "rotary"

    def __post_init__(self) -> None:
        layer, heads = self.layer, self.heads
        rotary = traits_of(self.model)[layer.index].rotary
        bands = [name for name in self.ablation.condition if name.kind == self.kind]
        self.pairs = None if rotary is None else RemovedPairs(bands=bands, rotary=rotary)
        # Angles turn the keys that other blocks attend to as well.
        alone = heads is None and not layer.shares_keys
        self.straightens = self.pairs if alone else None
        if rotary is not None and not alone and rotary.pairs is None:
            where = "where blocks share keys" if heads is None else "in some heads"
            raise UserError(
                f"RoPE of L{layer.index} cannot be removed {where}: its pairs of "
                "coordinates were not recognised"
            )

    def edit(self, attention: Attention) -> Attention:
        if self.pairs is None or self.straightens is not None:
            return attention
        angles = attention.angles
        assert angles is not None
        q, k = attention.q, attention.k
        left = self.pairs.straightened(angles) if self.heads is None else angles
        k = k if self.heads is None else repeat_heads(k, attention.n_heads)
        q, k = (self.in_heads(self.pairs.turned_back(x, angles), x, dim=2) for x in (q, k))
        return replace(attention, q=q, k=k, angles=left)


class Alibi(Removal):
    """The bias is left out of the scores."""

    kind = trait = "alibi"

    def edit(self, attention: Attention) -> Attention:
        return replace(attention, bias=self.filled(attention.bias, 0.0, dim=1))


class Sink(Removal):
    """The sinks take no attention."""

    kind, trait = "sink", "sinks"

    def edit(self, attention: Attention) -> Attention:
        return replace(attention, sinks=self.filled(attention.sinks, -torch.inf, dim=0))


class Weight(Removal):
    """A replacement of W_Q, W_K or W_V writes the output, one head for each query head.

    The model then norms and rotates the new output.
    """

    kind: ClassVar[Projection]

    def __post_init__(self) -> None:
        layer, heads, self.inputs = self.layer, self.heads, list[Tensor]()
        reason = layer.why_not_replaced(self.kind)
        if reason is not None:
            raise UserError(
                f"{self.kind} of L{layer.index} cannot be removed: {reason}; name removals "
                "without it"
            )
        self.source = layer.source_of_keys if self.kind in ("w_k", "w_v") else None
        lost = range(layer.n_heads) if heads is None else heads
        if self.source is not None and not self.ablation.acts_on(self.source, lost):
            raise UserError(
                f"{self.kind} of L{layer.index} cannot be removed by itself: it attends to "
                f"the keys and values of L{self.source}; remove {self.kind} of L{self.source} too"
            )

    def hooks(self, calibration: Calibration) -> Iterator[PlacedHook]:
        if self.source is not None:  # that block makes the keys and values
            return
        place = Place(layer=self.layer, name=self.kind, ablation=self.ablation, heads=self.heads)
        self.replaced, point = replace(place, calibration=calibration).made(), self.layer.point
        of_input = "attn.hook_z" if self.kind == "w_o" else self.layer.norm_point("ln1")
        yield first(point("hook_resid_pre"), self.drop)  # tensors of a pass that ended early
        yield last(point(of_input), self.keep)
        yield first(point(self.layer.output_point(self.kind)), self.write)
        yield last(point("hook_resid_post"), self.drop)

    def keep(self, tensor: Tensor, hook: HookPoint) -> None:
        self.inputs.append(tensor)

    def write(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        # A HookedTransformer norms the inputs of W_Q, W_K and W_V one after the other.
        place = ("w_q", "w_k", "w_v").index(self.kind) if len(self.inputs) == 3 else -1
        y = self.layer.norm_output("ln1", self.inputs[place])
        new = self.replaced.outputs(y).to(tensor.dtype)
        return self.in_heads(new, repeat_heads(tensor, self.layer.n_heads), dim=2)

    def drop(self, tensor: Tensor, hook: HookPoint) -> None:
        """Drop the tensors of a pass, because inputs and values of all blocks are gigabytes."""
        self.inputs.clear()


class WQ(Weight):
    """The queries are a replacement's."""

    kind = "w_q"


class WK(Weight):
    """The keys are a replacement's."""

    kind = "w_k"


class WV(Weight):
    """The values are a replacement's."""

    kind = "w_v"


class WO(Weight):
    """A replacement of W_O writes attention's output; if some heads keep W_O, its bias stays."""

    kind = "w_o"

    def write(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        z, heads = self.layer.by_head(self.inputs[-1]), self.heads
        if heads is None:
            return self.replaced.summed(z, range(self.layer.n_heads)).to(tensor.dtype)
        weight = self.layer.weight_per_head("w_o")[heads].to(z)
        removed = torch.einsum("bphd,hdm->bpm", z[:, :, heads], weight)
        return (tensor - removed + self.replaced.summed(z, heads)).to(tensor.dtype)


class Mlp(Removal):
    """The MLP's output is 0, in blocks that do not attend too."""

    kind = "mlp"

    @classmethod
    def is_in(cls, model: HookedModel) -> bool:
        return not layers_of(model)[0].attention_only and bool(mlp_outputs(model))

    @classmethod
    def hooks_outside(cls, model: HookedModel, ablation: Ablation) -> Iterator[PlacedHook]:
        for number, point in mlp_outputs(model).items():
            if ablation.layers is None or number in ablation.layers:
                yield first(point, lambda tensor, hook: torch.zeros_like(tensor))


class Norms(Removal):
    """The weights of the norms before attention and MLP are 1, their biases 0."""

    kind = "norms"

    def hooks(self, calibration: Calibration) -> Iterator[PlacedHook]:
        for norm in get_args(NormName):
            if self.layer.has(f"{norm}.hook_normalized"):
                yield from self.layer.hooks_without_norm_weight(norm)


class PosEmbed(Removal):
    """Learned positions are replaced by their mean over positions."""

    kind = "pos_embed"

    @classmethod
    def is_in(cls, model: HookedModel) -> bool:
        return position_point(model) is not None

    @classmethod
    def hooks_outside(cls, model: HookedModel, ablation: Ablation) -> Iterator[PlacedHook]:
        point = position_point(model)
        if point is not None:
            yield first(point, mean_over_positions)


class Content(Removal):
    """The heads attend as in the mean over texts, whatever the text says (PAPA, 2211.03495)."""

    kind = "content"

    def hooks(self, calibration: Calibration) -> Iterator[PlacedHook]:
        heads = range(self.layer.n_heads) if self.heads is None else self.heads
        self.fixed = calibration.patterns[self.layer.index].of_heads(heads)
        yield from ()

    def edit(self, attention: Attention) -> Attention:
        try:
            return replace(attention, fixed=self.fixed.first(attention.mask.n_keys))
        except ValueError as error:
            raise UserError(
                f"the mean attention of L{self.layer.index}: {error}; pass calibrate(model, "
                "tokens, heads=...) of that length"
            ) from error


def removals_of(condition: Condition) -> list[type[Removal]]:
    """Return the classes that remove what a condition removes, in the order of the rows."""
    kinds = {name.kind for name in condition}
    return [REMOVALS[kind] for kind in REMOVABLE if kind in kinds & {*REMOVALS}]


def mlp_outputs(model: HookedModel) -> dict[int, HookPoint]:
    """Return the hook points of MLPs' outputs by block number, in blocks that do not attend too."""
    blocks = enumerate(blocks_of(model))
    points = {number: find_point(block, "hook_mlp_out") for number, block in blocks}
    return {number: point for number, point in points.items() if point is not None}


def mean_over_positions(
    tensor: Float[Tensor, "batch pos d_model"], hook: HookPoint
) -> Float[Tensor, "batch pos d_model"]:
    """Replace each position's vector by the mean over positions."""
    return tensor.mean(-2, keepdim=True).expand_as(tensor).clone()


def components(model: HookedModel) -> tuple[Component, ...]:
    """Return the components that a model has.

    RoPE counts if any block has it; a NoPE HookedTransformer (`W_pos = 0`) has no `pos_embed`.
    """
    return tuple(name for name in COMPONENTS if REMOVALS[name].is_in(model))
