"""Streams that record their calls, or that run out of memory."""

from typing import Any

import torch

from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.streaming import Stream


class Recorded(Stream):
    """Records the sizes that batches are halved to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def batch_halved(self, batch_size: int) -> None:
        self.sizes.append(batch_size)


def out_of_memory_above(size: int, model: Any, layer: int) -> Any:
    """Run a model as if one layer ran out of memory on more than `size` sequences."""

    def refuse(tensor: torch.Tensor, hook: object) -> None:
        if len(tensor) > size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return hooks_attached([(layers_of(model)[layer].point("hook_resid_post"), refuse)])
