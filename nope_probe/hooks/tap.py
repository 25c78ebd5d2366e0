"""Hang hooks on hook points, run a model for them, and read what enters a block's score product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.layer import Layer, is_bridge

Hook = Callable[..., Tensor | None]
Installation = tuple[Any, Hook]  # a HookPoint and what to hang on it


@contextmanager
def installed(hooks: Iterable[Installation]) -> Iterator[None]:
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


class Enough(Exception):  # noqa: N818  (it ends a forward pass early, it is no error)
    """Raised by a hook once the last tensor that is wanted has been seen."""


def run(model: Any, batch: Tensor) -> None:
    """Run a batch of tokens or of input vectors through a model, for its hooks alone."""
    batch = batch.to(next(model.parameters()).device)
    try:
        if batch.is_floating_point() and not is_bridge(model):
            model(batch, start_at_layer=0, stop_at_layer=model.cfg.n_layers)
        elif is_bridge(model):
            model(batch)
        else:
            model(batch, stop_at_layer=model.cfg.n_layers)
    except Enough:
        return


class Tap:
    """Read what enters one block's score product in each forward pass.

    Install `hooks()` before the pass; from `hook_attn_scores` on, `read()` gives q and k as they
    are multiplied: after the projections, q/k-norm and RoPE, and after any earlier hook.
    """

    _NAMES = ("hook_q", "hook_k", "hook_cos", "hook_sin", "hook_rot_q", "hook_rot_k")

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.seen: dict[str, Tensor] = {}

    def hooks(self) -> list[Installation]:
        """The hooks that record, one per point that the block has."""
        names = [name for name in self._NAMES if self.layer.has(f"attn.{name}")]
        return [(self.layer.point(f"attn.{name}"), self._recorder(name)) for name in names]

    def _recorder(self, name: str) -> Hook:
        def record(tensor: Tensor, hook: object) -> None:
            self.seen[name] = tensor

        return record

    def read(self, which: Literal["q", "k"]) -> Float[Tensor, "batch pos head d_head"]:
        """Give q or k of the current pass."""
        # On Phi-3 the rotated hooks exist and never fire, so what fired decides.
        if f"hook_rot_{which}" in self.seen:
            return self.seen[f"hook_rot_{which}"]
        return self.finish(self.unrotated(which))

    def unrotated(self, which: Literal["q", "k"]) -> Float[Tensor, "batch pos head d_head"]:
        """Give q or k of the current pass after its norm, before RoPE."""
        return self.layer.norm(self.seen[f"hook_{which}"], which)

    def finish(
        self, x: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Rotate a normed query or key as this pass rotates its own."""
        return self.layer.rotate(x, self.seen)
