"""The removable components of a model, and the targets of an ablation, checked against the model.

A model has components: mask, RoPE, projections, MLP, learned positions. An ablation acts on blocks,
heads and rotary pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.base_layer import Layer, find_point
from nope_probe.hooks.layers.hook_points import HookedModel, HookPoint
from nope_probe.hooks.layers.model import (
    blocks_of,
    layers_of,
    numbered_layers,
    position_point,
    traits_of,
)
from nope_probe.hooks.layers.rotation import RemovedPairs
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.removal import COMPONENTS, Component, equal_bands


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """One block that an ablation acts on.

    Attributes:
        layer: the block.
        heads: query heads; None for all.
        rope: the rotary pairs that are removed, if the block has and loses any.
    """

    layer: Layer
    heads: list[int] | None
    rope: RemovedPairs | None


def resolve_targets(model: HookedModel, ablation: Ablation) -> list[Target]:
    """Return the blocks that an ablation acts on.

    Raises:
        ValueError: for a component, layer, head or band that the model does not have, or a prefix
            longer than its context; the message lists the model's own.
    """
    condition, has = ablation.condition, components(model)
    for name in COMPONENTS:
        if name in condition and name not in has:
            raise _lacks(model, name)
    if ablation.prefix is not None and ablation.prefix > model.cfg.n_ctx:
        raise ValueError(
            f"a prefix of {ablation.prefix} positions, but the model's context is {model.cfg.n_ctx}"
        )
    heads, numbers, lone = ablation.heads, ablation.layers, lone_mlps(model, ablation)
    if heads is not None:
        numbers = [index for index, named in heads.items() if len(named)]
    elif lone:
        known = [layer.index for layer in layers_of(model)] if numbers is None else numbers
        numbers = [number for number in known if number not in lone]
    rope = removed_pairs(model, condition.rope)
    try:
        layers = [] if numbers is not None and not len(numbers) else numbered_layers(model, numbers)
    except IndexError as error:
        raise ValueError(str(error)) from error
    targets = [
        Target(
            layer=layer,
            heads=None if heads is None else _heads(layer, heads[layer.index]),
            rope=rope[layer.index],
        )
        for layer in layers
    ]
    for target in targets:
        _validate_weights(target, ablation)
    return targets


def lone_mlps(model: HookedModel, ablation: Ablation) -> dict[int, HookPoint]:
    """Return the outputs of the MLPs to remove in blocks that do not attend, by block number."""
    if "mlp" not in ablation.condition:
        return {}
    attending = {layer.index for layer in layers_of(model)}
    points = {
        number: find_point(block, "hook_mlp_out")
        for number, block in enumerate(blocks_of(model))
        if number not in attending and (ablation.layers is None or number in ablation.layers)
    }
    return {number: point for number, point in points.items() if point is not None}


def _validate_weights(target: Target, ablation: Ablation) -> None:
    """Check that a block has the weights to be replaced, as matrices of their own."""
    for name in ablation.condition.weights:
        reason = target.layer.why_not_replaced(name)
        if reason is not None:
            raise ValueError(f"{name} of L{target.layer.index} cannot be removed: {reason}")
    rope = target.rope
    if rope is not None and target.heads is not None and rope.rotary.pairs is None:
        raise ValueError(
            f"RoPE of L{target.layer.index} cannot be removed in some heads: its pairs of "
            "coordinates were not recognised"
        )


def _lacks(model: HookedModel, name: str) -> ValueError:
    has = ", ".join(components(model))
    return ValueError(f"the model has no {name} to remove; it has {has}")


def _heads(layer: Layer, named: Sequence[int]) -> list[int] | None:
    """Return the named heads in order; None if these are all heads."""
    unknown = [head for head in named if head not in range(layer.n_heads)]
    if unknown:
        raise ValueError(
            f"L{layer.index} has the query heads 0 to {layer.n_heads - 1}, not {unknown[0]}"
        )
    heads = sorted(set(named))
    return None if len(heads) == layer.n_heads else heads


def removed_pairs(
    model: HookedModel, bands: Sequence[Component]
) -> Mapping[int, RemovedPairs | None]:
    """Return for each block the rotary pairs in some bands of RoPE; None where it rotates none.

    Raises:
        ValueError: for a band that the model does not have; the message lists the model's bands.
    """
    rotaries = {number: traits.rotary for number, traits in traits_of(model).items()}
    if not bands:
        return dict.fromkeys(rotaries)
    if not any(rotaries.values()):
        raise _lacks(model, bands[0])
    return {
        number: None if rotary is None else RemovedPairs(bands=bands, rotary=rotary)
        for number, rotary in rotaries.items()
    }


def components(model: HookedModel) -> tuple[Component, ...]:
    """Return the components that a model has.

    RoPE counts if any block has it; a NoPE HookedTransformer (`W_pos = 0`) has no `pos_embed`.
    """
    layers, traits = layers_of(model), traits_of(model).values()
    has = {
        "mask": model.cfg.attention_dir != "bidirectional",
        "rope": any(trait.rotary is not None for trait in traits),
        "mlp": not layers[0].attention_only
        and any(find_point(block, "hook_mlp_out") is not None for block in blocks_of(model)),
        "pos_embed": position_point(model) is not None,
        "alibi": any(trait.alibi for trait in traits),
        "window": any(trait.window for trait in traits),
        "sink": any(trait.sinks for trait in traits),
    }
    return tuple(name for name in COMPONENTS if has.get(name, True))


def rope_layers(model: HookedModel) -> tuple[bool, ...]:
    """Return for each block whether it rotates q and k."""
    traits = traits_of(model)
    return tuple(
        number in traits and traits[number].rotary is not None
        for number in range(len(blocks_of(model)))
    )


def rope_frequencies(model: HookedModel) -> tuple[Float[Tensor, " pair"] | None, ...]:
    """Return for each block that attends the angle per position of its rotary pairs, or None."""
    rotaries = [traits.rotary for traits in traits_of(model).values()]
    return tuple(None if rotary is None else rotary.frequencies for rotary in rotaries)


def bands_of(model: HookedModel, n_bands: int) -> tuple[Component, ...]:
    """Return the names of equal bands of a model's rotary pairs.

    Raises:
        UserError: for a model without RoPE, or more bands than pairs.
    """
    pairs = [len(angles) for angles in rope_frequencies(model) if angles is not None]
    if not pairs:
        has = ", ".join(components(model))
        raise UserError(f"--bands divides RoPE, and the model has none; it has {has}")
    try:
        return equal_bands(min(pairs), n_bands)
    except ValueError as error:
        raise UserError(str(error)) from error


def wavelengths_of(
    model: HookedModel, names: Iterable[Component]
) -> dict[str, tuple[float, float]]:
    """Return the shortest and the longest wavelength of bands `rope[a:b]`, in tokens, by name.

    There are none where the layers of a model rotate at different frequencies.
    """
    known = [2 * torch.pi / angles for angles in rope_frequencies(model) if angles is not None]
    if not known or any(not torch.equal(known[0], other) for other in known):
        return {}
    bands = {name: name.pairs for name in names if name.pairs is not None}
    return {name: (float(known[0][a]), float(known[0][b - 1])) for name, (a, b) in bands.items()}
