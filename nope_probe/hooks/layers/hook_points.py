"""Hook points of a model, and hooks on them next to other hooks.

HookedTransformer and TransformerBridge are a `HookedModel` as they are. This file does not import
TransformerLens, because that import takes seconds. Hooks are attached, kept in place, and taken off
for a while.

A hook that writes runs before all others, so that they see its output and may change it; a hook
that reads runs after them, so that it reads their final tensor. The order is restored
whenever the block (or other module) that the hooks belong to is entered.

A model is used by one thread at a time. The thread that reads or ablates a model keeps it, and the
passes of other threads are refused meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
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

from nope_probe.errors import UserError


@runtime_checkable
class Hook(Protocol):
    """A function of a hook point's tensor; a returned tensor replaces the hook point's."""

    def __call__(self, tensor: Tensor, /, *, hook: HookPoint) -> Tensor | None: ...


@runtime_checkable
class LensHandle(Protocol):
    """A hook point's handle of a hook."""

    @property
    def hook(self) -> RemovableHandle: ...

    @property
    def user_hook(self) -> object: ...


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

    Hooks of the same module run in the order of the groups; of a later context, those that write
    run before these.

    Raises:
        UserError: in a forward pass, if one of these hooks was removed inside the context.
    """
    by_module = defaultdict[nn.Module, list[PlacedHook]](list)
    for module, hooks in groups:
        by_module[module] += hooks
    with ExitStack() as stack:
        for module, placed_hooks in by_module.items():
            kept = _KeptInPlace()
            kept.handles += [
                (placed, stack.enter_context(_attached(placed.point, placed.hook)))
                for placed in placed_hooks
            ]
            stack.callback(module.register_forward_pre_hook(kept).remove)
            stack.callback(kept.handles.clear)
        yield


class _KeptInPlace:
    """Runs when a module is entered: checks that its hooks are there, and restores their order."""

    def __init__(self) -> None:
        self.handles: list[tuple[PlacedHook, LensHandle]] = []

    def __call__(self, module: nn.Module, args: object) -> None:
        orders = defaultdict[HookPoint, dict[str, list[int]]](lambda: {"first": [], "last": []})
        for placed, handle in [*self.handles]:
            if not any(fwd_hook is handle for fwd_hook in placed.point.fwd_hooks):
                raise UserError(
                    "the hooks of `ablated` were removed inside it (by reset_hooks?), and with "
                    "them the ablation: leave the context before hooks are reset"
                )
            orders[placed.point][placed.place].append(handle.hook.id)
        for point, order in orders.items():
            _restore_order(point, **order)


def _restore_order(point: Any, first: Sequence[int], last: Sequence[int]) -> None:
    """Move hooks of a hook point, by their ids, before and after all others."""
    # As TransformerLens's `prepend` does; PyTorch has no public way to reorder hooks.
    for number in reversed(first):
        point._forward_hooks.move_to_end(number, last=False)
    for number in last:
        point._forward_hooks.move_to_end(number)


class OfThread:
    """A hook of this package, which a pass that another thread is in the middle of does not run."""

    def __init__(self, hook: Hook) -> None:
        self.hook, self.thread = hook, get_ident()

    def __call__(self, tensor: Tensor, /, *, hook: HookPoint) -> Tensor | None:
        return self.hook(tensor, hook=hook) if get_ident() == self.thread else None


@contextmanager
def hooks_attached(hooks: Iterable[Attachment]) -> Iterator[None]:
    """Add hooks to hook points, in order, and remove exactly these."""
    with ExitStack() as stack:
        for point, hook in hooks:
            stack.enter_context(_attached(point, hook))
        yield


@contextmanager
def _attached(point: HookPoint, hook: Hook) -> Iterator[LensHandle]:
    of_thread = OfThread(hook)
    point.add_hook(of_thread)
    handle = next(handle for handle in [*point.fwd_hooks] if handle.user_hook is of_thread)
    try:
        yield handle
    finally:
        handle.hook.remove()
        if handle in point.fwd_hooks:
            point.fwd_hooks.remove(handle)


@contextmanager
def hooks_detached(model: HookedModel) -> Iterator[None]:
    """Run without the hooks that are on hook points now, even an ablation's."""

    def without(point: Any) -> Callable[..., Any]:
        detached = {*point._forward_hooks}

        def run(tensor: Tensor) -> Tensor:
            for number, hook in [*point._forward_hooks.items()]:
                if number not in detached:
                    written = hook(point, (tensor,), tensor)
                    tensor = tensor if written is None else written
            return tensor

        return run

    with ExitStack() as stack:
        for module in cast(nn.Module, model).modules():
            if isinstance(module, HookPoint) and cast(Any, module)._forward_hooks:
                # What `__call__` of a module runs: its forward pass and its hooks.
                stack.enter_context(methods_replaced(module, _call_impl=without(module)))
        yield


@contextmanager
def methods_replaced(module: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one instance for as long as the context lasts."""
    # Past a bridge's __setattr__, which would pass them on to the HF module.
    attributes = vars(module) if methods else {}
    before = {name: attributes[name] for name in methods if name in attributes}
    # Code looks at their signatures.
    wrapped = {name: wraps(getattr(module, name))(method) for name, method in methods.items()}
    attributes.update(wrapped)
    try:
        yield
    finally:
        for name in methods:
            attributes.pop(name, None)
        attributes.update(before)
