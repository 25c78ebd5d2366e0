"""Read the queries and keys that enter one block's score product."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.forward import Hook, Installation
from nope_probe.hooks.layer import Layer


class QKReader:
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
