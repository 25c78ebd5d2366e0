"""Hook points of a model, and hooks on them next to other hooks.

HookedTransformer and TransformerBridge are a `HookedModel` as they are. This file does not import
TransformerLens, because that import takes seconds. Hooks are attached, kept in place, and taken off
for a while.

A hook that writes runs before all others, so that they see its output and may change it; a hook
that reads runs after them, so that it reads their final tensor. The order is restored
whenever the block (or other module) that the hooks belong to is entered.

Several threads may run a model at once. Hooks that read, and methods replaced for a reading, are of
the thread that attached them: the passes of other threads do not run them. An ablation's hooks run
in all passes that begin after they were attached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from threading import Lock, get_ident
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

INSTALLING = Lock()  # for the moments in which something of a model is replaced or put back


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

    Where groups have the same module, the hooks that write of a later group come first.

    Raises:
        UserError: in a forward pass, if one of these hooks was removed inside the context.
    """
    by_module = defaultdict[nn.Module, list[Sequence[PlacedHook]]](list)
    for module, hooks in groups:
        by_module[module].append(hooks)
    with ExitStack() as stack:
        for module, grouped in by_module.items():
            firsts = [placed for hooks in reversed(grouped) for placed in hooks]
            lasts = [placed for hooks in grouped for placed in hooks]
            kept = _KeptInPlace(
                [placed for placed in firsts if placed.place == "first"]
                + [placed for placed in lasts if placed.place == "last"]
            )
            kept.handles += [
                (placed, stack.enter_context(_attached(placed.point, kept.in_entered(placed.hook))))
                for placed in kept.hooks
            ]
            stack.callback(module.register_forward_pre_hook(kept).remove)
            stack.callback(kept.handles.clear)
        yield


class _KeptInPlace:
    """Runs when a module is entered: checks that its hooks are there, and restores their order.

    A pass that is inside the module when the hooks are attached does not run them: they may belong
    together, as a hook that keeps a tensor and a hook that writes it.
    """

    def __init__(self, hooks: Sequence[PlacedHook]) -> None:
        self.hooks = hooks
        self.handles: list[tuple[PlacedHook, LensHandle]] = []
        self.entered: set[int] = set()  # the threads whose passes have entered the module

    def in_entered(self, hook: Hook) -> Hook:
        """Return a hook that runs in the passes that have entered the module with the hooks."""

        def run(tensor: Tensor, hook: HookPoint, *, placed: Hook = hook) -> Tensor | None:
            return placed(tensor, hook=hook) if get_ident() in self.entered else None

        return run

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
        self.entered.add(get_ident())


def _restore_order(point: Any, first: Sequence[int], last: Sequence[int]) -> None:
    """Move hooks of a hook point, by their ids, before and after all others."""
    # As TransformerLens's `prepend` does; PyTorch has no public way to reorder hooks. Hooks that
    # are in order stay untouched, because a pass of another thread may be running them.
    hooks = point._forward_hooks
    present = [*hooks]
    if present[: len(first)] != first:
        for number in reversed(first):
            hooks.move_to_end(number, last=False)
    if present[len(present) - len(last) :] != last:
        for number in last:
            hooks.move_to_end(number)


class OfThread:
    """A hook that runs in the passes of the thread that made it, and in no others."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self.thread = hook, get_ident()

    def __call__(self, *args: object, **options: object) -> Any:
        return self.hook(*args, **options) if get_ident() == self.thread else None


@contextmanager
def hooks_attached(hooks: Iterable[Attachment]) -> Iterator[None]:
    """Add hooks to hook points for this thread's passes, in order, and remove exactly these."""
    with ExitStack() as stack:
        for point, hook in hooks:
            stack.enter_context(_attached(point, OfThread(hook)))
        yield


@contextmanager
def _attached(point: HookPoint, hook: Hook) -> Iterator[LensHandle]:
    point.add_hook(hook)
    handle = next(handle for handle in [*point.fwd_hooks] if handle.user_hook is hook)
    try:
        yield handle
    finally:
        handle.hook.remove()
        if handle in point.fwd_hooks:
            point.fwd_hooks.remove(handle)


@contextmanager
def hooks_detached(model: HookedModel) -> Iterator[None]:
    """Let this thread's passes run without the hooks on hook points now, even an ablation's."""

    def without(point: Any, _: object) -> Callable[..., Any]:
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
                make = partial(without, module)
                stack.enter_context(replaced_in_this_thread(module, "_call_impl", make))
        yield


@contextmanager
def registered(
    registry: MutableMapping[Any, Any], key: object, value: object, taken: str
) -> Iterator[None]:
    """Keep a value in a registry for as long as the context lasts.

    Raises:
        UserError: saying `taken`, if another value is there, of any thread.
    """
    if registry.setdefault(key, value) is not value:
        raise UserError(taken)
    try:
        yield
    finally:
        del registry[key]


class _ByThread:
    """A method of one instance that some threads have replaced.

    Attributes:
        before: the instance's attribute of this name; None for the method of its class.
        replaced: the replacements, by thread.
    """

    def __init__(self, module: object, name: str) -> None:
        self.before: Callable[..., Any] | None = vars(module).get(name)
        self.method: Callable[..., Any] = getattr(module, name)
        self.replaced: dict[int, Callable[..., Any]] = {}
        update_wrapper(self, self.method)  # its signature is looked at

    def __call__(self, *args: object, **options: object) -> Any:
        return self.replaced.get(get_ident(), self.method)(*args, **options)


@contextmanager
def replaced_in_this_thread(
    module: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a method of one instance in this thread for as long as the context lasts.

    Args:
        module: the instance.
        name: the method's name.
        make: makes the replacement of the method as this thread has it.
    """
    attributes, thread = vars(module), get_ident()
    with INSTALLING:
        by_thread = attributes.get(name)
        if not isinstance(by_thread, _ByThread):
            # Past a bridge's __setattr__, which would pass it on to the HF module.
            by_thread = attributes[name] = _ByThread(module, name)
        outer = by_thread.replaced.get(thread)
        by_thread.replaced[thread] = make(outer or by_thread.method)
    try:
        yield
    finally:
        with INSTALLING:
            if outer is not None:
                by_thread.replaced[thread] = outer
            else:
                del by_thread.replaced[thread]
            if not by_thread.replaced:
                del attributes[name]
                attributes |= {} if by_thread.before is None else {name: by_thread.before}


@contextmanager
def methods_replaced(module: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one instance, in all threads, for as long as the context lasts."""
    # Past a bridge's __setattr__, which would pass them on to the HF module.
    attributes = vars(module) if methods else {}
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            attributes.pop(name, None)
        attributes.update(before)
