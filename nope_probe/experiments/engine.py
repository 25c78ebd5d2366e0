"""What the commands share that run a model in several conditions."""

from __future__ import annotations

from torch import Tensor

from nope_probe.hooks.calibration import Calibration, calibrate, weights_checksum
from nope_probe.hooks.protocols import HookedModel
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
