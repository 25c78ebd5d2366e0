"""Captures that are read from a run's checkpoint, or else run and saved there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nope_probe.experiments.finite import validate_finite
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.calibration import calibrate, weights_checksum
from nope_probe.hooks.reading.capture import capture_losses, capture_scores, capture_stages
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.maps import ScoreMaps, StageMaps
from nope_probe.maps.stored_maps import StoredMaps, packed_tensors
from nope_probe.runtime.checkpoint import RunCheckpoint


def scores_once(
    checkpoint: RunCheckpoint, key: str, model: HookedModel, inputs: Tensor, **options: Any
) -> ScoreMaps:
    """Return score maps, captured with `capture_scores` unless the checkpoint has them."""
    if key not in checkpoint:
        with checkpoint.stream(key) as stream:
            maps = capture_scores(model, inputs, checkpoint=stream, **options)
        checkpoint.save(key, maps.to_tensors())
    return ScoreMaps.from_tensors(checkpoint.load(key))


def stored_scores_once(
    checkpoint: RunCheckpoint,
    key: str,
    model: HookedModel,
    inputs: Tensor,
    condition: str,
    **options: Any,
) -> StoredMaps:
    """Return score maps of which folds stay in the checkpoint, captured unless it has them.

    Raises:
        UserError: for a non-finite score, naming the condition.
    """
    if key not in checkpoint:
        with checkpoint.stream(key) as stream:
            maps = capture_scores(model, inputs, checkpoint=stream, **options)
        validate_finite(maps, condition)
        checkpoint.save(key, packed_tensors(maps))
    return StoredMaps.from_stored(checkpoint.open(key))


def stages_once(
    checkpoint: RunCheckpoint, key: str, model: HookedModel, inputs: Tensor, **options: Any
) -> StageMaps:
    """Return stage maps, captured with `capture_stages` unless the checkpoint has them."""
    if key not in checkpoint:
        with checkpoint.stream(key) as stream:
            maps = capture_stages(model, inputs, checkpoint=stream, **options)
        checkpoint.save(key, maps.to_tensors())
    return StageMaps.from_tensors(checkpoint.load(key))


def losses_once(
    checkpoint: RunCheckpoint, key: str, model: HookedModel, tokens: Tensor, *, batch_size: int
) -> Tensor:
    """Return the loss of every token, from `capture_losses` unless the checkpoint has them."""
    if key not in checkpoint:
        with checkpoint.stream(key) as stream:
            losses = capture_losses(model, tokens, batch_size=batch_size, checkpoint=stream)
        checkpoint.save(key, {"losses": losses})
    return checkpoint.load(key)["losses"]


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
    if key not in checkpoint:
        with checkpoint.stream(key) as stream:
            measured = calibrate(model, inputs, batch_size=batch_size, seed=seed, checkpoint=stream)
        checkpoint.save(key, measured.to_tensors())
    return Calibration.from_tensors(checkpoint.load(key), weights_checksum(model))
