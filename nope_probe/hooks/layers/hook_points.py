"""Hook points of a model, and hooks on them next to other hooks.

HookedTransformer and TransformerBridge are a `HookedModel` as they are. This file does not import
TransformerLens, because that import takes seconds. Hooks are attached, kept in place, and taken off
for a while.

A hook that writes runs before all others, so that they see its output and may change it; a hook
that reads runs after them, so that it reads their final tensor. The order is restored
whenever the block (or other module) that the hooks belong to is entered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    runtime_checkable,
)

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nope_probe.hooks.layers.threads import in_this_thread, used_alone


@runtime_checkable
class Hook(Protocol):
    """A function of a hook point's tensor; a returned tensor replaces the hook point's."""

    def __call__(self, tensor: Tensor, /, *, hook: HookPoint) -> Tensor | None: ...


@runtime_checkable
class LensHandle(Protocol):
    """A hook point's handle of a hook."""

    @property
    def hook(self) -> RemovableHandle: ...


@runtime_checkable
class HookPoint(Protocol):
    """A named place in a model's forward pass, at which hooks read or replace the tensor."""

    @property
    def fwd_hooks(self) -> list[LensHandle]: ...

    def __call__(self, tensor: Tensor, /) -> Tensor:
        """Return a tensor as hooks change it."""

    def add_hook(self, hook: Hook, *, prepend: bool = False) -> object:
        """Add a hook after the present hooks, or before them."""


Attachment: TypeAlias = tuple[HookPoint, Hook]


@runtime_checkable
class ModelConfig(Protocol):
    """The fields that every model's configuration has, by TransformerLens's names."""

    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    n_ctx: int
    d_vocab: int
    attn_scale: float
    attention_dir: str
    normalization_type: str | None
    positional_embedding_type: str


@runtime_checkable
class HookedModel(Protocol):
    """A HookedTransformer or TransformerBridge.

    Only `hooks.layers` knows the differences between the two.
    """

    @property
    def cfg(self) -> ModelConfig: ...

    def __call__(self, inputs: Tensor, /, **options: object) -> Tensor:
        """Return the logits of a batch of tokens."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class PlacedHook(NamedTuple):
    """A hook, and whether it runs before or after all others at its hook point."""

    point: HookPoint
    hook: Hook
    place: Literal["first", "last"]


def first(point: HookPoint, hook: Hook) -> PlacedHook:
    """Return a hook that writes, so it runs before all others."""
    return PlacedHook(point, hook, "first")


def last(point: HookPoint, hook: Hook) -> PlacedHook:
    """Return a hook that reads, so it runs after all others."""
    return PlacedHook(point, hook, "last")


class HookGroup(NamedTuple):
    """The hooks of one module, in their order of running among hooks of the same place."""

    module: nn.Module
    hooks: Sequence[PlacedHook]


@contextmanager
def hooks_in_place(groups: Iterable[HookGroup]) -> Iterator[None]:
    """Attach groups of hooks, keep their places, and always remove exactly these.

    Raises:
        RuntimeError: in a forward pass, if one of these hooks was removed inside the context.
    """
    with ExitStack() as stack:
        for module, hooks in groups:
            handles = [
                (placed, stack.enter_context(_attached(placed.point, placed.hook)))
                for placed in hooks
            ]
            on_entry = module.register_forward_pre_hook(_PlacesRestored(handles))
            stack.callback(on_entry.remove)
        yield


def restores_places(hook: object) -> bool:
    """Return whether `hooks_in_place` added a hook to its module."""
    return isinstance(hook, _PlacesRestored)


class _PlacesRestored:
    """Runs when a module is entered: checks that its hooks are there, and restores their order."""

    def __init__(self, handles: Sequence[tuple[PlacedHook, LensHandle]]) -> None:
        self.handles = handles

    def __call__(self, module: nn.Module, args: object) -> None:
        for placed, handle in self.handles:
            if not any(fwd_hook is handle for fwd_hook in placed.point.fwd_hooks):
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
    # As TransformerLens's `prepend` does; PyTorch has no public way to reorder hooks.
    module: Any = point
    module._forward_hooks.move_to_end(handle.hook.id, last=to_end)


def keep_and_write() -> tuple[Hook, Hook]:
    """Return a hook that keeps a tensor, and a hook that writes it at a later hook point."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        kept[:] = [tensor]

    def write(tensor: Tensor, hook: HookPoint) -> Tensor:
        return kept.pop().to(tensor.dtype)

    return keep, write


@contextmanager
def hooks_attached(hooks: Iterable[Attachment]) -> Iterator[None]:
    """Add hooks to hook points for this thread's passes, in order, and remove exactly these."""
    with ExitStack() as stack:
        for point, hook in hooks:
            stack.enter_context(_attached(point, in_this_thread(hook)))
        yield


@contextmanager
def _attached(point: HookPoint, hook: Hook) -> Iterator[LensHandle]:
    point.add_hook(hook)
    handle = point.fwd_hooks[-1]
    try:
        yield handle
    finally:
        handle.hook.remove()
        if handle in point.fwd_hooks:
            point.fwd_hooks.remove(handle)


@contextmanager
def hooks_detached(model: HookedModel) -> Iterator[None]:
    """Run a model without any hook that is attached to it now, even without an ablation's hooks."""
    with used_alone(model), ExitStack() as stack:
        for module, name, others in list(_hooks_to_detach(model)):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, others)
        yield


def _hooks_to_detach(model: HookedModel) -> Iterator[tuple[Any, str, OrderedDict[int, Any]]]:
    """Yield modules, the attributes that keep their hooks, and the hooks that stay."""
    for module in cast(nn.Module, model).modules():
        if isinstance(module, HookPoint):
            yield module, "_forward_hooks", OrderedDict()
        if module._forward_pre_hooks:
            kept = [
                pair for pair in module._forward_pre_hooks.items() if not restores_places(pair[1])
            ]
            yield module, "_forward_pre_hooks", OrderedDict(kept)


@contextmanager
def methods_replaced(module: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one instance for as long as the context lasts."""
    # Past a bridge's __setattr__, which would pass them on to the HF module.
    attributes = vars(module)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            attributes.pop(name, None)
        attributes.update(before)
