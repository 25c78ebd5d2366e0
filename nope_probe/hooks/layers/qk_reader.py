"""Read the queries and keys that enter one block's score product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.hooks.layers.base_layer import Heads, Layer, QueryOrKey
from nope_probe.hooks.layers.protocols import Attachment, HookPoint


class QKReader:
    """Reads the queries and keys of one block in each forward pass.

    Attach `hooks()` before the pass; from `hook_attn_scores` on, `read()` returns q and k as they
    are multiplied: after the projections, q/k-norm and RoPE, and after any earlier hook.

    Attributes:
        fired: the tensors of the current pass, by the names of attention's hook points.
    """

    _NAMES = ("hook_q", "hook_k", "hook_cos", "hook_sin", "hook_rot_q", "hook_rot_k")

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.fired: dict[str, Tensor] = {}

    def hooks(self, names: Sequence[str] = _NAMES) -> list[Attachment]:
        """Return the hooks that record, one per hook point that the block has."""
        found = [name for name in names if self.layer.has(f"attn.{name}")]
        return [(self.layer.point(f"attn.{name}"), partial(self._record, name)) for name in found]

    def _record(self, name: str, tensor: Tensor, hook: HookPoint) -> None:
        self.fired[name] = tensor

    def reset(self) -> None:
        """Drop the tensors of the current pass."""
        self.fired.clear()

    def read(self, which: QueryOrKey) -> Heads:
        """Return q or k of the current pass."""
        # On Phi-3 the rotated hooks exist and never fire, so what fired decides.
        rotated = self.fired.get(f"hook_rot_{which}")
        return self.rebuild(which) if rotated is None else rotated

    def rebuild(self, which: QueryOrKey) -> Heads:
        """Return q or k of the current pass, normed and rotated again after the projection."""
        return self.rotate(self.unrotated(which))

    def unrotated(self, which: QueryOrKey) -> Heads:
        """Return q or k of the current pass after the norm and before RoPE."""
        return self.layer.qk_norm(self.fired[f"hook_{which}"], which)

    def rotate(self, x: Heads, real: Bool[Tensor, "batch pos"] | None = None) -> Heads:
        """Rotate normed queries or keys as this pass rotates its own.

        Args:
            x: normed queries or keys.
            real: which positions are not padding; None for all.
        """
        return self.layer.rotate(x, self.fired, real)

    def rotation(self, q: Heads) -> Float[Tensor, "pos d_head d_head"]:
        """Return the matrix that turns a query at each position, from what every unit becomes."""
        n_pos, d_head = q.shape[1], q.shape[3]
        units = torch.eye(d_head, dtype=q.dtype, device=q.device)
        turned = self.rotate(units[:, None, None].expand(-1, n_pos, 1, -1))
        return turned[:, :, 0].permute(1, 2, 0)
