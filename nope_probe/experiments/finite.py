"""Checks that a run's maps hold numbers, on every condition, before anything is analysed."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Inputs
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.maps.maps import ScoreMaps, StageMaps


def validate_finite(maps: ScoreMaps, condition: str) -> None:
    """Check that every score at or below the diagonal, unless masked, is finite.

    Raises:
        UserError: naming layer and condition.
    """
    n = maps.folds.shape[-1]
    below = torch.ones(n, n, dtype=torch.bool).tril()
    for layer, visible in enumerate(maps.visible):
        if not are_finite(maps.folds[:, layer], visible & below):
            raise UserError(f"non-finite scores in L{layer}, {condition}")
        if maps.per_head is not None and not are_finite(maps.per_head[:, layer], visible & below):
            raise UserError(f"non-finite scores of a head in L{layer}, {condition}")


def validate_finite_stages(maps: StageMaps, model: str) -> None:
    """Check that every value of every stage, but for masked scores, is finite.

    Raises:
        UserError: naming stage and model.
    """
    for letter, folds in maps.folds.items():
        cells = maps.visible.get(letter, torch.ones(folds.shape[-2:], dtype=torch.bool))
        if not are_finite(folds, cells):
            raise UserError(f"non-finite values at stage ({letter}) of {model}")


def are_finite(
    maps: Float[Tensor, "*batch row_pos col_pos"], cells: Bool[Tensor, "row_pos col_pos"]
) -> bool:
    """Return whether maps are finite in all of the given cells."""
    return bool(maps[..., cells].isfinite().all())


def validate_first_sequence(model: HookedModel, inputs: Inputs, n_layers: int) -> None:
    """Check on one sequence, before all are run, that the first layers have a pattern to measure.

    Raises:
        UserError: for a score that is not finite, or a sliding window.
    """
    maps = capture_scores(model, inputs[:1], layers=range(n_layers), batch_size=1, n_folds=1)
    validate_finite(maps, "the intact model")
    validate_window(maps)


def validate_window(maps: ScoreMaps) -> None:
    """Check that queries of every layer attend to all earlier keys: patterns are measured on these.

    Raises:
        UserError: naming the layer and the length of its sliding window.
    """
    n = maps.folds.shape[-1]
    for layer, visible in enumerate(maps.visible):
        if not visible[torch.ones(n, n, dtype=torch.bool).tril()].all():
            window = int(visible[-1].sum())
            raise UserError(
                f"L{layer} sees {window} keys of {n} (a sliding window): "
                f"lower --seq-len to {window}, or take fewer --layers"
            )
