"""Take the learned weights out of a model's norms, without touching its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nope_probe.hooks.forward import Hook, Installation, hooks_attached
from nope_probe.hooks.layer import BridgeLayer, Layer, layers_of

NORMS = ("ln1", "ln2")


@contextmanager
def plain_norms(model: Any) -> Iterator[Any]:
    """Run a model as if the norms of its blocks only normalised: weights 1, biases 0.

    The norm before attention and the one before the MLP lose their weights in every block; the last
    norm and q/k-norms keep theirs. It can stand around `ablated`.

    Raises:
        ValueError: for a HookedTransformer whose norm has a weight of exactly 0, which cannot be
            taken back.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.norm_weights import plain_norms
        >>> model = load("nope-tiny").model
        >>> with plain_norms(model):
        ...     logits = model(torch.tensor([[0, 5, 9]]))
    """
    hooks = [pair for layer in layers_of(model) for pair in _hooks(layer)]
    with hooks_attached(hooks):
        yield model


def _hooks(layer: Layer) -> Iterator[Installation]:
    for name in NORMS:
        if not layer.has(f"{name}.hook_normalized"):
            continue
        if isinstance(layer, BridgeLayer):
            keep, write = _pass_on()
            yield layer.point(f"{name}.hook_normalized"), keep
            yield layer.point(f"{name}.hook_out"), write
        elif hasattr(getattr(layer.block, name), "w"):
            yield layer.point(f"{name}.hook_normalized"), _undo(getattr(layer.block, name))


def _pass_on() -> tuple[Hook, Hook]:
    """Give a hook that keeps the normalised tensor and one that writes it over the output."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor, hook: object) -> None:
        kept[:] = [tensor]

    def write(tensor: Tensor, hook: object) -> Tensor:
        return kept.pop().to(tensor.dtype)

    return keep, write


def _undo(norm: Any) -> Hook:
    """Divide by the weight that HookedTransformer multiplies with after its hook point."""
    if bool((norm.w == 0).any()):
        raise ValueError("a norm with a weight of 0 cannot be taken back through its hook point")
    bias = getattr(norm, "b", torch.zeros((), device=norm.w.device))

    def write(tensor: Tensor, hook: object) -> Tensor:
        return (tensor - bias) / norm.w

    return write
