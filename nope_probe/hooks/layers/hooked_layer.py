"""A block of a HookedTransformer: its hook points, what its norms carry, the layout of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nope_probe.components import Projection
from nope_probe.hooks.layers.attached_hooks import PlacedHook, first, keep_and_write, last
from nope_probe.hooks.layers.attention import (
    RemovedPairs,
    Rotary,
    angle_per_pair,
    check_no_cache,
    unmasked,
)
from nope_probe.hooks.layers.base_layer import (
    OPTIONS,
    Attend,
    Heads,
    Layer,
    NormName,
    QueryOrKey,
    Vectors,
    Visible,
)
from nope_probe.hooks.layers.protocols import HookPoint


class HookedLayer(Layer):
    """A block of a HookedTransformer."""

    kind = "HookedTransformer"
    attn_out_point = "hook_attn_out"
    rope_point = "attn.hook_rot_q"
    has_sinks = False
    _UNFUSED = ("hook_attn_scores", "hook_pattern")

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        if cfg.use_normalization_before_and_after or cfg.parallel_attn_mlp:
            raise NotImplementedError(
                "post-norm and parallel blocks are read through TransformerBridge, "
                "not HookedTransformer: load the model with nope_probe.load"
            )
        self.scale = 1.0 / float(self.attn.attn_scale)
        cap = getattr(cfg, "attn_scores_soft_cap", -1.0)
        self.soft_cap = cap if cap and cap > 0 else None

    @property
    def has_qk_norm(self) -> bool:
        return bool(self.cfg.use_qk_norm)

    @property
    def d_rotary(self) -> int:
        return self.cfg.rotary_dim or self.d_head

    def norm_point(self, norm: NormName) -> str:
        return f"{norm}.hook_normalized"

    def norm_output(self, norm: NormName, tensor: Vectors) -> Vectors:
        # hook_normalized leaves out the learned weight (and LayerNorm's bias).
        module = getattr(self.block, norm)
        tensor = tensor.to(self.cfg.dtype)
        if hasattr(module, "w"):
            tensor = tensor * module.w
        return tensor + module.b if hasattr(module, "b") else tensor

    def hooks_without_norm_weight(self, norm: NormName) -> Iterator[PlacedHook]:
        module: Any = getattr(self.block, norm)
        if not hasattr(module, "w"):
            return
        if bool((module.w == 0).any()):
            raise ValueError(f"L{self.index} {norm} has a weight of 0, which cannot be divided out")
        bias = getattr(module, "b", torch.zeros((), device=module.w.device))

        def divide(tensor: Tensor, hook: HookPoint) -> Tensor:
            return (tensor - bias) / module.w  # the model multiplies after its hook point

        yield first(self.point(self.norm_point(norm)), divide)

    def hooks_without_rope(self, rope: RemovedPairs) -> Iterator[PlacedHook]:
        which: QueryOrKey
        for which in ("q", "k"):
            keep, write = keep_and_write(partial(self._unrotated, which=which, rope=rope))
            yield last(self.point(f"attn.hook_{which}"), keep)
            yield first(self.point(f"attn.hook_rot_{which}"), write)

    def _unrotated(
        self,
        x: Heads,
        turned: Float[Tensor, "batch turned_pos head d_head"],
        which: QueryOrKey,
        rope: RemovedPairs,
    ) -> Heads:
        """Return the rotated q or k with some pairs as after q/k-norm, times RoPE's factor."""
        check_no_cache(x.shape[1], turned.shape[1])
        return self.with_unrotated(self.qk_norm(x, which), turned, rope)

    def rotary(self, fired: dict[str, Tensor]) -> Rotary | None:
        if "hook_rot_q" not in fired:
            return None
        cos, sin = self.attn.rotary_cos.double(), self.attn.rotary_sin.double()
        frequencies = angle_per_pair(torch.atan2(sin[1], cos[1]), self.adjacent)
        return Rotary(frequencies=frequencies, factor=float(cos[0, 0]))

    def score_bias(self, n_pos: int) -> Float[Tensor, "head query_pos key_pos"] | None:
        if self.cfg.positional_embedding_type != "alibi":
            return None
        return self.attn.alibi[:, -n_pos:, :n_pos]

    def qk_norm(self, x: Heads, which: QueryOrKey) -> Heads:
        if not self.cfg.use_qk_norm:
            return x
        module = self.attn.q_norm if which == "q" else self.attn.k_norm
        flat = module(rearrange(x, "batch pos head d_head -> (batch pos head) d_head"))
        return flat.view_as(x)

    def rotate(
        self, x: Heads, fired: dict[str, Tensor], real: Bool[Tensor, "batch pos"] | None = None
    ) -> Heads:
        if self.cfg.positional_embedding_type != "rotary":
            return x
        # TransformerLens counts the positions of RoPE without padding.
        return self.attn.apply_rotary(x, 0, None if real is None else real.long())

    @property
    def has_plain_attention(self) -> bool:
        return self.soft_cap is None and not any(getattr(self.cfg, each, False) for each in OPTIONS)

    def fused_forward(self, attend: Attend, replaced: Collection[Projection]) -> Callable[..., Any]:
        return partial(self._attention, attend, replaced)

    def _attention(
        self,
        attend: Attend,
        replaced: Collection[Projection],
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        **_: Any,
    ) -> Tensor:
        attn = self.attn
        if "w_q" in replaced:  # all of q comes from a hook: of no position it costs nothing
            query_input = query_input[:, :0]
        q, k, v = attn.calculate_qkv_matrices(query_input, key_input, value_input)
        if self.cfg.positional_embedding_type == "rotary":
            q, k = attn.hook_rot_q(attn.apply_rotary(q)), attn.hook_rot_k(attn.apply_rotary(k))
        z = attn.hook_z(attend(q, k, v, self._visible(q)))
        if "w_o" in replaced:
            return z.new_zeros(()).expand(*z.shape[:2], self.d_model)
        return torch.einsum("bqhd,hdm->bqm", z, attn.W_O) + attn.b_O

    def _visible(self, q: Heads) -> Visible:
        n = q.shape[1]
        scores = q.new_zeros(1, 1, n, n)
        if self.cfg.attention_dir == "causal":
            scores = self.attn.apply_causal_mask(scores)
        return unmasked(scores[0, 0])

    def weight(self, name: Projection) -> nn.Parameter:
        return self._parameter("W", name)

    def weight_per_head(self, name: Projection) -> Float[Tensor, "head rows cols"]:
        return self.weight(name).detach()

    def bias_per_head(self, name: Projection) -> Float[Tensor, "head d_head"]:
        return self._parameter("b", name).detach()

    def _parameter(self, letter: Literal["W", "b"], name: Projection) -> nn.Parameter:
        grouped = self.cfg.n_key_value_heads is not None and name in ("w_k", "w_v")
        return getattr(self.attn, f"{'_' if grouped else ''}{letter}_{name[-1].upper()}")
