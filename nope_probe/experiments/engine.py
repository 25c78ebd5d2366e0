"""Captures of a run: read from its checkpoint, or else computed and saved there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.calibration import calibrate, weights_checksum
from nope_probe.hooks.reading.capture import capture_losses, capture_scores
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.maps import ScoreMaps
from nope_probe.runtime.checkpoint import RunCheckpoint


def calibration_once(
    checkpoint: RunCheckpoint,
    key: str,
    model: HookedModel,
    inputs: Tensor,
    *,
    batch_size: int,
    seed: int | None = None,
) -> Calibration:
    """Return gains and means, measured with `calibrate` unless the checkpoint has them.

    The checkpoint belongs to a run of one model. Weights that are rewritten on another device may
    differ from the stored gains' in the last bit, so that no checksum is stored beside these.
    """
    tensors = checkpoint.once(
        key,
        lambda stream: calibrate(
            model, inputs, batch_size=batch_size, seed=seed, checkpoint=stream
        ).to_tensors(),
    )
    return Calibration.from_tensors(tensors, weights_checksum(model))


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
