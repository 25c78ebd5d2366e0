"""Carry a tensor from one hook point of a forward pass to a later one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nope_probe.hooks.protocols import Hook, HookPoint


def carry(change: Callable[[Tensor, Tensor], Tensor] | None = None) -> tuple[Hook, Hook]:
    """Return a hook that keeps a tensor, and one that writes it at a later hook point.

    With `change`, what is written is made from the earlier tensor and from the later one.
    """
    kept: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        kept[:] = [tensor]

    def write(tensor: Tensor, hook: HookPoint) -> Tensor:
        earlier = kept.pop()
        return (earlier if change is None else change(earlier, tensor)).to(tensor.dtype)

    return keep, write
