"""Carry a tensor from one hook point of a forward pass to a later one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from nope_probe.hooks.protocols import Hook, HookPoint

Change = Callable[[Tensor, Tensor], Tensor]  # the earlier tensor and the later one


def carry(change: Change | None = None) -> tuple[Hook, Hook]:
    """Return a hook that keeps a tensor, and one that writes it at a later hook point.

    With `change`, what is written is made from the earlier tensor and from the later one.
    """
    kept: list[Tensor] = []
    return partial(_keep, kept), partial(_write, kept, change)


def _keep(kept: list[Tensor], tensor: Tensor, hook: HookPoint) -> None:
    kept[:] = [tensor]


def _write(kept: list[Tensor], change: Change | None, tensor: Tensor, hook: HookPoint) -> Tensor:
    earlier = kept.pop()
    return (earlier if change is None else change(earlier, tensor)).to(tensor.dtype)
