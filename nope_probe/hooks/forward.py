"""Attach hooks to hook points, and run a model's forward pass for what they record."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs, forward
from nope_probe.hooks.placed import restores_places
from nope_probe.hooks.protocols import Attachment, HookedModel, HookPoint


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


class StopForward(Exception):  # noqa: N818  (it ends a forward pass early, it is no error)
    """Raised by a hook that has read the last tensor that is wanted."""


def run_forward(model: HookedModel, inputs: Inputs) -> None:
    """Run a batch of tokens or of vectors through a model, for its hooks alone.

    Vectors are what enters the first block, on every kind of model.
    """
    inputs = inputs.to(next(model.parameters()).device)
    try:
        forward(model, inputs)
    except StopForward:
        return


def run_blocks(model: HookedModel, inputs: Inputs) -> Float[Tensor, "batch pos d_model"]:
    """Run a batch of tokens or of vectors, and return the output of the last block.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.forward import run_blocks
        >>> run_blocks(load("parameter-free", n_layers=2).model, torch.randn(3, 5, 64)).shape
        torch.Size([3, 5, 64])
    """
    outputs: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        outputs.append(tensor)
        raise StopForward

    with hooks_attached([(layers_of(model)[-1].point("hook_resid_post"), keep)]):
        run_forward(model, inputs)
    return outputs[0]
