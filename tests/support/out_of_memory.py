"""Simulate a device that runs out of memory, on the CPU."""

from typing import Any

import torch

from nope_probe.hooks.layers.attached_hooks import hooks_attached
from nope_probe.hooks.layers.model import layers_of


def out_of_memory_above(size: int, model: Any, layer: int) -> Any:
    """Run a model as if one layer ran out of memory on more than `size` sequences."""

    def refuse(tensor: torch.Tensor, hook: object) -> None:
        if len(tensor) > size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return hooks_attached([(layers_of(model)[layer].point("hook_resid_post"), refuse)])
