"""Hooks on a model beside those of others: attached, kept in place, taken off for a while.

A hook that writes comes before all others, so that they see and may change what it wrote; a hook
that reads comes after them, so that it reads what they made of the tensor. The order is restored
whenever the block (or other module) that the hooks belong to is entered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn

from nope_probe.hooks.layers.protocols import Attachment, Hook, HookedModel, HookPoint, LensHandle


class PlacedHook(NamedTuple):
    """A hook, and whether it comes before or after all others at its hook point."""

    point: HookPoint
    hook: Hook
    place: Literal["first", "last"]


def first(point: HookPoint, hook: Hook) -> PlacedHook:
    """Return a hook that comes before all others: one that writes."""
    return PlacedHook(point, hook, "first")


def last(point: HookPoint, hook: Hook) -> PlacedHook:
    """Return a hook that comes after all others: one that reads."""
    return PlacedHook(point, hook, "last")


@dataclass(frozen=True, kw_only=True)
class HookGroup:
    """The hooks of one module.

    Attributes:
        module: the module whose forward pass the hooks belong to.
        hooks: in the order in which those of the same place are to run.
        start: called when the module is entered.
    """

    module: nn.Module
    hooks: Sequence[PlacedHook]
    start: Callable[[], None]


@contextmanager
def hooks_in_place(groups: Sequence[HookGroup]) -> Iterator[None]:
    """Attach groups of hooks, keep their places, and always remove exactly these.

    Raises:
        RuntimeError: in a forward pass, if one of them was removed meanwhile.
    """
    attached = [_AttachedGroup(group) for group in groups]
    try:
        for each in attached:
            each.attach()
        yield
    finally:
        for each in reversed(attached):
            each.remove()


def restores_places(hook: object) -> bool:
    """Return whether a hook on a module is one of those that `hooks_in_place` adds."""
    return isinstance(getattr(hook, "__self__", None), _AttachedGroup)


class _AttachedGroup:
    def __init__(self, group: HookGroup) -> None:
        self.group = group
        self.handles: list[tuple[PlacedHook, LensHandle]] = []
        self.on_entry: Any = None

    def attach(self) -> None:
        self.on_entry = self.group.module.register_forward_pre_hook(self._enter)
        for placed in self.group.hooks:
            placed.point.add_hook(placed.hook)
            self.handles.append((placed, placed.point.fwd_hooks[-1]))

    def remove(self) -> None:
        if self.on_entry is not None:
            self.on_entry.remove()
        for placed, handle in reversed(self.handles):
            handle.hook.remove()
            if handle in placed.point.fwd_hooks:
                placed.point.fwd_hooks.remove(handle)

    def _enter(self, module: nn.Module, args: object) -> None:
        """Check that the hooks are still there, and restore their order."""
        self.group.start()
        for placed, handle in self.handles:
            if not any(each is handle for each in placed.point.fwd_hooks):
                raise RuntimeError(
                    "the hooks of `ablated` were removed inside it (by reset_hooks?), and with "
                    "them the ablation: leave the context before hooks are reset"
                )
        for placed, handle in self.handles:
            if placed.place == "last":
                _move(placed.point, handle, to_end=True)
        for placed, handle in reversed(self.handles):
            if placed.place == "first":
                _move(placed.point, handle, to_end=False)


def _move(point: HookPoint, handle: LensHandle, *, to_end: bool) -> None:
    # As TransformerLens's own `prepend` does; PyTorch has no public way to reorder hooks.
    module: Any = point
    module._forward_hooks.move_to_end(handle.hook.id, last=to_end)


def keep_and_write() -> tuple[Hook, Hook]:
    """Return a hook that keeps a tensor, and one that writes it at a later hook point."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        kept[:] = [tensor]

    def write(tensor: Tensor, hook: HookPoint) -> Tensor:
        return kept.pop().to(tensor.dtype)

    return keep, write


@contextmanager
def hooks_attached(hooks: Iterable[Attachment]) -> Iterator[None]:
    """Add hooks to hook points, in order, and always remove exactly these."""
    handles = []
    try:
        for point, hook in hooks:
            point.add_hook(hook)
            handles.append((point, point.fwd_hooks[-1]))
        yield
    finally:
        for point, handle in reversed(handles):
            handle.hook.remove()
            if handle in point.fwd_hooks:
                point.fwd_hooks.remove(handle)


@contextmanager
def hooks_detached(model: HookedModel) -> Iterator[None]:
    """Run a model without any hook that is attached to it now, those of an ablation included."""
    modules = list(cast(nn.Module, model).modules())
    attached = [(each, each._forward_hooks) for each in modules if isinstance(each, HookPoint)]
    entered = [(each, each._forward_pre_hooks) for each in modules if each._forward_pre_hooks]
    try:
        for point, _ in attached:
            point._forward_hooks = OrderedDict()
        for module, hooks in entered:
            others = {key: hook for key, hook in hooks.items() if not restores_places(hook)}
            module._forward_pre_hooks = OrderedDict(others)
        yield
    finally:
        for point, after in attached:
            point._forward_hooks = after
        for module, hooks in entered:
            module._forward_pre_hooks = hooks
