"""The removals of a command: their flag, and whether the model has the components and bands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from nope_probe.components import (
    WEIGHTS,
    Ablation,
    Component,
    Gain,
    equal_bands,
    is_rope,
    removal_order,
    writer_of,
)
from nope_probe.errors import UserError

if TYPE_CHECKING:
    from nope_probe.hooks.layers.model import Inputs
    from nope_probe.hooks.layers.protocols import HookedModel

GainFlag = Annotated[Gain, tyro.conf.arg(help="The size of the replacements identity and random.")]


def validate_components(wanted: Collection[str], has: Sequence[Component]) -> None:
    """Check that a model has some components.

    Raises:
        UserError: naming a component that it lacks, and its own.
    """
    ordered = [name for name in sorted(wanted, key=removal_order) if not writer_of(name)]
    lacking = [name for name in ordered if ("rope" if is_rope(name) else name) not in has]
    if lacking:
        raise UserError(f"the model has no {lacking[0]}; it has {', '.join(has)}")


def validate_removable(model: HookedModel, names: Collection[str]) -> None:
    """Check that a model has bands of RoPE, weights as matrices of their own, and writers.

    Raises:
        UserError: naming a part that cannot be removed, and why.
    """
    from nope_probe.hooks.reading.calibration import blocks_that_write
    from nope_probe.hooks.removing.targets import removed_pairs, resolve_targets

    try:
        removed_pairs(model, [name for name in names if is_rope(name)])
        blocks_that_write(model, [writer for name in names if (writer := writer_of(name))])
    except ValueError as error:
        raise UserError(str(error)) from error
    try:
        resolve_targets(model, Ablation(remove=[name for name in WEIGHTS if name in names]))
    except ValueError as error:
        raise UserError(f"{error}; name players or removals without it") from error


def irreplaceable(model: HookedModel) -> dict[str, str]:
    """Return the weights of a model that no ablation can replace, and why."""
    from nope_probe.hooks.layers.model import layers_of

    return {
        name: reason
        for name in WEIGHTS
        for layer in layers_of(model)
        if (reason := layer.why_not_replaced(name)) is not None
    }


def without_effect(model: HookedModel, inputs: Inputs, n_layers: int) -> dict[str, str]:
    """Return the sources of a model that do nothing in sequences of this length, and why.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: tokens, or vectors.
        n_layers: how many blocks are run.
    """
    from nope_probe.hooks.reading.batch_readings import window_hides
    from nope_probe.hooks.removing.targets import components

    if "window" not in components(model) or window_hides(model, inputs[:1], n_layers):
        return {}
    return {"window": f"it hides no key in sequences of {inputs.shape[1]} tokens"}


def bands_of(model: HookedModel, n_bands: int) -> tuple[str, ...]:
    """Return the names of equal bands of a model's rotary pairs.

    Raises:
        UserError: for a model without RoPE, or more bands than pairs.
    """
    from nope_probe.hooks.removing.targets import components, rope_frequencies

    pairs = [len(angles) for angles in rope_frequencies(model) if angles is not None]
    if not pairs:
        has = ", ".join(components(model))
        raise UserError(f"--bands divides RoPE, and the model has none; it has {has}")
    try:
        return equal_bands(min(pairs), n_bands)
    except ValueError as error:
        raise UserError(str(error)) from error
