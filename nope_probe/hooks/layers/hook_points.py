"""Hook points of a model, and hooks on them next to other hooks.

HookedTransformer and TransformerBridge are a `HookedModel` as they are. This file does not import
TransformerLens, because that import takes seconds. Hooks are attached, kept in place, and taken off
for a while.

A hook that writes runs before all others, so that they see its output and may change it; a hook
that reads runs after them, so that it reads their final tensor.

A model is used by one thread at a time. The thread that reads or ablates a model keeps it, and the
passes of other threads are refused meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
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

    def add_hook(self, hook: Hook, *, is_permanent: bool = False, prepend: bool = False) -> object:
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


@contextmanager
def hooks_in_place(hooks: Iterable[PlacedHook]) -> Iterator[None]:
    """Attach hooks, keep their places at their points, and always remove exactly these.

    First hooks of a point run in the order in which they are given, and so do its last hooks. First
    hooks of a later context run before these. `reset_hooks` keeps them: they are permanent.

    Raises:
        UserError: at the end, if permanent hooks were reset meanwhile.
    """
    placed = [*hooks]
    with ExitStack() as stack:
        for point, hook, place in reversed(placed):  # the foremost is put in front at the end
            if place == "first":
                stack.enter_context(_attached(point, hook, is_permanent=True, prepend=True))
        for point, hook, place in placed:
            if place == "last":
                handle = stack.enter_context(_attached(point, hook, is_permanent=True))
                behind_all = partial(_run_last, handle.hook.id)
                stack.enter_context(cast(nn.Module, point).register_forward_pre_hook(behind_all))
        yield
        present = [of.user_hook for point, *_ in placed for of in point.fwd_hooks]
        in_place = {of.hook for of in present if isinstance(of, OfThread)}
        if not in_place >= {hook for _, hook, _ in placed}:
            raise UserError(
                "permanent hooks of the model were reset meanwhile, and passes after that were "
                "intact: leave out reset_hooks(including_permanent=True)"
            )


def _run_last(number: int, point: Any, args: object) -> None:
    """Move a hook of a hook point, by its id, behind hooks that were added after it."""
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
def _attached(point: HookPoint, hook: Hook, **options: bool) -> Iterator[LensHandle]:
    of_thread = OfThread(hook)
    point.add_hook(of_thread, **options)
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
    modules = cast(nn.Module, model).modules()
    points = [vars(module) for module in modules if isinstance(module, HookPoint)]
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    before = [(point, kind, point[kind]) for point in points for kind in kinds if point[kind]]
    for point, kind, _ in before:
        point[kind] = OrderedDict()
    try:
        yield
    finally:
        for point, kind, hooks in before:
            point[kind] = hooks


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
