"""The blocks that an ablation acts on, and the ablations in effect on each model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from jaxtyping import Int
from torch import Tensor, nn

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import (
    HookedModel,
    HookPoint,
    OfThread,
    PlacedHook,
)
from nope_probe.hooks.layers.model import layers_of, modules_of, numbered_layers
from nope_probe.hooks.layers.passes import traits_of
from nope_probe.hooks.removing.components import Target, components, lone_mlps, removals_of
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Calibration, WrittenPositions
from nope_probe.maps.folds import halves_of
from nope_probe.removal import Condition, validate_components


class BlockAblation:
    """Removes components from one block, for as long as its hooks are attached.

    Args:
        target: the block, and the query heads that lose the components.
        ablation: the removals.

    Raises:
        UserError: saying why the block cannot lose a component.
    """

    def __init__(self, target: Target, ablation: Ablation) -> None:
        self.layer, self.heads, self.condition = target.layer, target.heads, ablation.condition
        self.removals = [removal(target, ablation) for removal in removals_of(self.condition)]
        self.straightens = next((r.straightens for r in self.removals if r.straightens), None)

    def hooks(self, calibration: Calibration | None) -> list[PlacedHook]:
        """Return the block's hooks, given the result of `calibrate` if the ablation needs it."""
        return [hook for removal in self.removals for hook in removal.hooks(calibration)]

    def edit(self, attention: Attention) -> Attention:
        """Return attention as every removal leaves it, the mask last: it needs the window's.

        Raises:
            UserError: if keys come from a cache, or for padding that the removal would count.
        """
        if not all(name.row.by_token for name in self.condition):
            check_sequences(attention, self.condition)
        for removal in reversed(self.removals):
            attention = removal.edit(attention)
        return attention


def ablations_of(model: HookedModel, ablation: Ablation) -> list[BlockAblation]:
    """Return the ablations of the blocks that an ablation acts on.

    Raises:
        UserError: for a component, layer, head or band that the model does not have or cannot lose,
            or a prefix longer than its context; the message lists what the model has.
    """
    validate_components(ablation.condition, components(model))
    if ablation.prefix is not None and ablation.prefix > model.cfg.n_ctx:
        raise UserError(
            f"a prefix of {ablation.prefix} positions, but the model's context is {model.cfg.n_ctx}"
        )
    heads, numbers, lone = ablation.heads, ablation.layers, lone_mlps(model, ablation)
    if heads is not None:
        numbers = [index for index, named in heads.items() if len(named)]
    elif lone:
        known = [layer.index for layer in layers_of(model)] if numbers is None else numbers
        numbers = [number for number in known if number not in lone]
    layers = [] if numbers is not None and not len(numbers) else numbered_layers(model, numbers)
    targets = (
        Target(
            layer=layer,
            heads=None if heads is None else _heads(layer, heads[layer.index]),
            rotary=traits_of(model)[layer.index].rotary,
        )
        for layer in layers
    )
    return [BlockAblation(target, ablation) for target in targets]


def content_heads(model: HookedModel, ablations: Iterable[Ablation]) -> dict[int, list[int]]:
    """Return the heads that lose their content in some ablation, by layer, for `calibrate`."""
    heads: dict[int, set[int]] = {}
    for ablation in ablations:
        if "content" in ablation.condition:
            for block in ablations_of(model, ablation):
                lost = range(block.layer.n_heads) if block.heads is None else block.heads
                heads.setdefault(block.layer.index, set()).update(lost)
    return {layer: sorted(heads[layer]) for layer in sorted(heads)}


def _heads(layer: Layer, named: Sequence[int]) -> list[int] | None:
    """Return the named heads in order; None if these are all heads."""
    unknown = [head for head in named if head not in range(layer.n_heads)]
    if unknown:
        raise UserError(
            f"L{layer.index} has the query heads 0 to {layer.n_heads - 1}, not {unknown[0]}"
        )
    heads = sorted(set(named))
    return None if len(heads) == layer.n_heads else heads


def check_sequences(attention: Attention, remove: Condition) -> None:
    """Check that a pass is over whole sequences, unpadded where their length matters.

    Raises:
        UserError: if keys come from a cache, or for padding that the removal would count.
    """
    n_queries, n_keys = attention.mask.n_queries, attention.mask.n_keys
    if n_queries != n_keys:
        raise UserError(
            f"{n_keys} keys for {n_queries} queries: in this ablation a position depends on all "
            "others, and no cache of keys and values holds: pass whole sequences (use_cache=False)"
        )
    names = sorted(name for name in remove if name.of_length)
    if names and not attention.mask.real.all():
        raise UserError(
            f"removing {' and '.join(names)} depends on the length of the sequences, which "
            "padding changes: pass sequences of one length, without padding"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ActiveAblation:
    """An ablation that is in effect.

    Attributes:
        ablation: the removals.
        hooks: the hooks that are attached.
        positions: the positions that are removed, if any.
    """

    ablation: Ablation
    hooks: Sequence[PlacedHook]
    positions: WrittenPositions | None = None


ABLATED: WeakKeyDictionary[HookedModel, ActiveAblation] = WeakKeyDictionary()


def estimated_on_halves(model: HookedModel, fold_of: Int[Tensor, " seq"]) -> bool:
    """Return whether a model loses what was estimated on the texts of each half of these folds.

    Fewer than 4 folds have no products across halves.

    Raises:
        UserError: where the texts were cut into other halves.
    """
    positions = ABLATED[model].positions if model in ABLATED else None
    if positions is None or fold_of.max() < 3 or len(positions.halves) != len(fold_of):
        return False
    if not positions.halves.equal(halves_of(fold_of)):
        raise UserError(
            "removed position was measured on other halves of the texts than those of the folds: "
            "pass Sequences with the capture's documents, and an even number of folds"
        )
    return True


def foreign_hooks(model: HookedModel) -> list[str]:
    """Return the names of modules with hooks that are neither this package's nor a library's."""

    def has_others(module: nn.Module) -> bool:
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if isinstance(module, HookPoint):
            return len(hooks) != sum(isinstance(of.user_hook, OfThread) for of in module.fwd_hooks)
        return not all(_is_of_the_libraries(hook) for hook in hooks)

    return [name for name, module in modules_of(model).items() if has_others(module)]


def _is_of_the_libraries(hook: object) -> bool:
    # After a call that asked for attentions or hidden states, transformers leaves hooks in place.
    # They record nothing until such a call comes again.
    known = ("nope_probe.", "transformer_lens.", "transformers.utils.output_capturing")
    return str(getattr(hook, "__module__", "")).startswith(known)
