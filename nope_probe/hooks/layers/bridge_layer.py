"""A block of a TransformerBridge: its hook points, what its norms carry, the layout of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

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
    rotated,
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


class BridgeLayer(Layer):
    """A block of a TransformerBridge."""

    kind = "TransformerBridge"
    attn_out_point = "attn.hook_out"
    rope_point = "attn.hook_cos"
    _UNFUSED = (
        *("hook_attn_scores", "hook_pattern", "hook_result"),
        *("hook_rot_q", "hook_rot_k", "hook_q_normed", "hook_k_normed"),
    )

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        self.hf_attn: Any = self.attn.original_component
        # Of GPT-2, transformers' own factor has `scale_attn_by_inverse_layer_idx` in it.
        self.scale = float(getattr(self.hf_attn, "scaling", None) or self.d_head**-0.5)
        self.soft_cap = getattr(self.hf_attn, "attn_logit_softcapping", None)

    @property
    def has_qk_norm(self) -> bool:
        return bool(getattr(self.cfg, "use_qk_norm", False)) or self.has("attn.q_norm.hook_out")

    @property
    def has_sinks(self) -> bool:
        return getattr(self.hf_attn, "sinks", None) is not None

    @property
    def d_rotary(self) -> int:
        parameters = getattr(self.hf_attn.config, "rope_parameters", None) or {}
        return int(self.d_head * (parameters.get("partial_rotary_factor") or 1.0))

    def norm_point(self, norm: NormName) -> str:
        # The projections' own input, whichever norms come before it.
        return "attn.hook_in" if norm == "ln1" else "ln2.hook_out"

    def norm_output(self, norm: NormName, tensor: Vectors) -> Vectors:
        return tensor

    def hooks_without_norm_weight(self, norm: NormName) -> Iterator[PlacedHook]:
        keep, write = keep_and_write()
        yield last(self.point(f"{norm}.hook_normalized"), keep)
        yield first(self.point(f"{norm}.hook_out"), write)

    def hooks_without_rope(self, rope: RemovedPairs) -> Iterator[PlacedHook]:
        if self.has("attn.hook_cos"):
            yield first(
                self.point("attn.hook_cos"), partial(self._fill_pairs, rope, rope.rotary.factor)
            )
            yield first(self.point("attn.hook_sin"), partial(self._fill_pairs, rope, 0.0))

    def _fill_pairs(
        self, rope: RemovedPairs, value: float, tensor: Tensor, hook: HookPoint
    ) -> Tensor:
        pairs = rope.mask(tensor.shape[1]).to(tensor.device)
        columns = pairs.repeat_interleave(2) if self._angles_twice else pairs.repeat(2)
        return tensor.masked_fill(columns, value)

    def rotary(self, fired: dict[str, Tensor]) -> Rotary | None:
        if "hook_cos" not in fired:  # a NoPE layer: RoPE's hooks did not fire
            return None
        cos, sin = fired["hook_cos"][0].double(), fired["hook_sin"][0].double()
        frequencies = angle_per_pair(torch.atan2(sin[1], cos[1]), self._angles_twice)
        return Rotary(frequencies=frequencies, factor=float(cos[0, 0]))

    @property
    def _angles_twice(self) -> bool:
        """Whether cos and sin come as 0 0 1 1 (in Cohere), where the others' are 0 1 0 1."""
        return bool(getattr(self.cfg, "rotary_interleaved_cos_sin", False))

    def qk_norm(self, x: Heads, which: QueryOrKey) -> Heads:
        module = self.attn._modules.get(f"{which}_norm")
        if module is None:
            return x
        if getattr(self.attn, "_qk_norm_phase", None) != "post_reshape":
            raise NotImplementedError("q/k-norm over all heads at once is not supported")
        x = rearrange(x, "batch pos head d_head -> batch head pos d_head")
        x = module.original_component(x)
        return rearrange(x, "batch head pos d_head -> batch pos head d_head")

    def rotate(
        self, x: Heads, fired: dict[str, Tensor], real: Bool[Tensor, "batch pos"] | None = None
    ) -> Heads:
        if "hook_cos" not in fired:  # a NoPE layer: RoPE's hooks did not fire
            return x
        cos, sin = fired["hook_cos"], fired["hook_sin"]
        if self._angles_twice:
            cos, sin = (torch.cat([angles[..., ::2]] * 2, -1) for angles in (cos, sin))
        return rotated(x, cos, sin, self.adjacent)

    @property
    def has_plain_attention(self) -> bool:
        options = any(getattr(self.cfg, each, False) for each in OPTIONS)
        known = all(hasattr(self.attn, name) for name in ("q", "k", "v", "o"))
        return known and not options and self.soft_cap is None and not self.has_sinks

    def fused_forward(self, attend: Attend, replaced: Collection[Projection]) -> Callable[..., Any]:
        # All are computed: a bridge's projections have hook points of their own, for others' hooks.
        return partial(self._attention, attend)

    def _attention(self, attend: Attend, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        attn = self.attn
        x = attn.hook_in(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        q, k, v = (
            rearrange(project(x), "batch pos (head d) -> batch pos head d", d=self.d_head)
            for project in (attn.q, attn.k, attn.v)
        )
        q, k = self.qk_norm(q, "q"), self.qk_norm(k, "k")
        angles = kwargs.get("position_embeddings")
        if angles is not None and getattr(self.hf_attn, "use_rope", True):
            cos, sin = attn._apply_position_embedding_hooks(angles)
            fired = {"hook_cos": cos, "hook_sin": sin}
            q, k = self.rotate(q, fired), self.rotate(k, fired)
        z = attend(q, k, v, self._visible(q, kwargs.get("attention_mask")))
        return attn.hook_out(attn.o(z.flatten(2))), None

    def _visible(self, q: Heads, mask: Tensor | None) -> Visible:
        n = q.shape[1]
        scores = self.attn._apply_reconstruct_attention_mask(q.new_zeros(1, 1, n, n), mask, n)
        return unmasked(scores[0, 0])

    def weight(self, name: Projection) -> nn.Parameter:
        return self._linear(name).weight

    def weight_per_head(self, name: Projection) -> Float[Tensor, "head rows cols"]:
        weight = self.weight(name).detach()
        if type(self._linear(name)).__name__ == "Conv1D":  # of GPT-2, stored as [in, out]
            weight = weight.T
        if name == "w_o":
            return rearrange(weight, "m (head h) -> head h m", h=self.d_head)
        return rearrange(weight, "(head h) m -> head m h", h=self.d_head)

    def bias_per_head(self, name: Projection) -> Float[Tensor, "head d_head"] | None:
        bias = self._linear(name).bias
        return None if bias is None else bias.detach().view(-1, self.d_head)

    def _linear(self, name: Projection) -> Any:
        return getattr(self.attn, name[-1]).original_component
