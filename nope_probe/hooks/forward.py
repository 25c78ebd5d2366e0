"""Attach hooks to hook points, and run a model's forward pass for what they record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layer import is_bridge, layers_of

Hook = Callable[..., Tensor | None]
Installation = tuple[Any, Hook]  # a HookPoint and what to hang on it
Batch = Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_model"]


@contextmanager
def hooks_attached(hooks: Iterable[Installation]) -> Iterator[None]:
    """Add hooks to hook points, in order, and always take exactly these off again."""
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


class StopForward(Exception):  # noqa: N818  (it ends a forward pass early, it is no error)
    """Raised by a hook once the last tensor that is wanted has been seen."""


def run_forward(model: Any, batch: Batch) -> None:
    """Run a batch of tokens or of vectors through a model, for its hooks alone.

    Vectors are what enters the first block, on every kind of model.
    """
    batch = batch.to(next(model.parameters()).device)
    try:
        if is_bridge(model):
            with entering(model, batch):
                model(batch)
        elif batch.is_floating_point():
            model(batch, start_at_layer=0, stop_at_layer=model.cfg.n_layers)
        else:
            model(batch, stop_at_layer=model.cfg.n_layers)
    except StopForward:
        return


def run_blocks(model: Any, batch: Batch) -> Float[Tensor, "batch pos d_model"]:
    """Run a batch of tokens or of vectors, and give what leaves the last block.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.forward import run_blocks
        >>> run_blocks(load("parameter-free", n_layers=2).model, torch.randn(3, 5, 64)).shape
        torch.Size([3, 5, 64])
    """
    left: list[Tensor] = []

    def keep(tensor: Tensor, hook: object) -> None:
        left.append(tensor)
        raise StopForward

    with hooks_attached([(layers_of(model)[-1].point("hook_resid_post"), keep)]):
        run_forward(model, batch)
    return left[0]


@contextmanager
def entering(model: Any, batch: Batch) -> Iterator[None]:
    """Let vectors enter a bridge's first block as they are; tokens are left alone.

    A bridge takes vectors for input embeddings, to which GPT-2 adds positions. `start_at_layer`
    would do, but TransformerLens 3.9 has it for HookedTransformers only.
    """
    if not batch.is_floating_point():
        yield
        return
    point = layers_of(model)[0].point("hook_resid_pre")
    # First of all hooks, so that they see what entered.
    point.add_hook(lambda tensor, hook: batch, prepend=True)
    handle = point.fwd_hooks[0]
    try:
        yield
    finally:
        handle.hook.remove()
        point.fwd_hooks.remove(handle)
