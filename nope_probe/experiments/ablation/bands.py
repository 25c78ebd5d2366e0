"""Bands of RoPE as players: which ones a run has, checked against the model."""

from __future__ import annotations

from collections.abc import Sequence

from nope_probe.errors import UserError
from nope_probe.hooks.components import components, rope_frequencies
from nope_probe.hooks.protocols import HookedModel
from nope_probe.hooks.rope_names import equal_bands


def bands_of(model: HookedModel, n_bands: int) -> tuple[str, ...]:
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


def with_bands(players: Sequence[str], bands: Sequence[str]) -> list[str]:
    """Return players with bands in place of RoPE.

    Example:
        >>> with_bands(["mask", "rope"], ["rope[0:2]", "rope[2:4]"])
        ['mask', 'rope[0:2]', 'rope[2:4]']
    """
    return [each for name in players for each in (bands if name == "rope" else [name])]
