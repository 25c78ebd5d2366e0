"""Captures that are read from a run's checkpoint, or else run and saved there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nope_probe.hooks.accumulators import State
from nope_probe.hooks.capture import capture_scores, capture_stages
from nope_probe.hooks.gains import Gains, calibrate
from nope_probe.hooks.maps import ScoreMaps, StageMaps
from nope_probe.hooks.protocols import HookedModel
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


def stages_once(
    checkpoint: RunCheckpoint, key: str, model: HookedModel, inputs: Tensor, **options: Any
) -> StageMaps:
    """Return stage maps, captured with `capture_stages` unless the checkpoint has them."""
    if key not in checkpoint:
        with checkpoint.stream(key) as stream:
            maps = capture_stages(model, inputs, checkpoint=stream, **options)
        checkpoint.save(key, maps.to_tensors())
    return StageMaps.from_tensors(checkpoint.load(key))


def gains_once(
    checkpoint: RunCheckpoint, key: str, model: HookedModel, inputs: Tensor, *, batch_size: int
) -> Gains:
    """Return gains, measured with `calibrate` unless the checkpoint has them."""
    if key not in checkpoint:
        with checkpoint.stream(key) as stream:
            gains = calibrate(model, inputs, batch_size=batch_size, checkpoint=stream)
        tensors: State = {name: torch.tensor(c, dtype=torch.float64) for name, c in gains.c.items()}
        checkpoint.save(key, tensors)
    kept = checkpoint.load(key)
    return Gains(c={name: tuple(c.tolist()) for name, c in kept.items()})  # type: ignore[misc]
