"""Captures of the behaviour command, from its checkpoint or run and saved there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nope_probe.experiments.engine import calibration_once
from nope_probe.hooks.capture import capture_scores
from nope_probe.hooks.losses import capture_losses
from nope_probe.hooks.maps import ScoreMaps
from nope_probe.hooks.protocols import HookedModel
from nope_probe.runtime.checkpoint import RunCheckpoint

__all__ = ["calibration_once", "losses_once", "scores_once"]


def scores_once(
    checkpoint: RunCheckpoint, key: str, model: HookedModel, inputs: Tensor, **options: Any
) -> ScoreMaps:
    """Return score maps, captured with `capture_scores` unless the checkpoint has them."""
    return ScoreMaps.from_tensors(
        checkpoint.once(
            key,
            lambda stream: capture_scores(model, inputs, checkpoint=stream, **options).to_tensors(),
        )
    )


def losses_once(
    checkpoint: RunCheckpoint, key: str, model: HookedModel, tokens: Tensor, *, batch_size: int
) -> Tensor:
    """Return the loss of every token, from `capture_losses` unless the checkpoint has them."""
    return checkpoint.once(
        key,
        lambda stream: {
            "losses": capture_losses(model, tokens, batch_size=batch_size, checkpoint=stream)
        },
    )["losses"]
