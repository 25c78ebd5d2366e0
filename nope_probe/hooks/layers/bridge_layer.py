"""A block of a TransformerBridge: its attention, what its norms carry, the layout of weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from nope_probe.components import Projection
from nope_probe.hooks.layers.attached_hooks import PlacedHook, first, keep_and_write, last
from nope_probe.hooks.layers.attention import repeat_heads
from nope_probe.hooks.layers.base_layer import Layer, NormName, Vectors
from nope_probe.hooks.layers.tap import NAME, register


class BridgeLayer(Layer):
    """A block of a TransformerBridge."""

    kind = "TransformerBridge"
    attn_out_point = "attn.hook_out"

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        self.hf_attn: Any = self.attn.original_component

    @property
    def attending(self) -> nn.Module:
        return self.hf_attn

    @property
    def uses_interface(self) -> bool:
        """Whether transformers looks up by name what computes this block's attention."""
        return hasattr(sys.modules[type(self.hf_attn).__module__], "ALL_ATTENTION_FUNCTIONS")

    @property
    def has_qk_norm(self) -> bool:
        return bool(getattr(self.cfg, "use_qk_norm", False)) or self.has("attn.q_norm.hook_out")

    @property
    def soft_cap(self) -> float | None:
        return getattr(self.hf_attn, "attn_logit_softcapping", None)

    def attach_tap(self) -> None:
        register()
        assert self.tap  # in place before the first pass
        vars(self.attn)["forward"] = self._attend
        self.hf_attn.config._attn_implementation = NAME
        for bridge in self.attn.submodules.values():
            # GPT-2's o stands beside transformers' own module, not in its place.
            if self.hf_attn._modules.get(bridge.name) is bridge.original_component:
                self.hf_attn._modules[bridge.name] = bridge
        joint = self.attn._modules.get("qkv")
        if joint is not None:
            vars(joint)["forward"] = partial(self._project, self._rows_of_joint(joint))

    def detach_tap(self) -> None:
        super().detach_tap()
        self.hf_attn.config._attn_implementation = "eager"
        joint = self.attn._modules.get("qkv")
        if joint is not None:
            del vars(joint)["forward"]

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' own attention, in which q, k, v and o have their hook points."""
        from transformer_lens.model_bridge.generalized_components import AttentionBridge

        tap = self.tap
        tap.angles = kwargs.get("position_embeddings")
        if tap.rope is not None and tap.angles is not None:
            kwargs["position_embeddings"] = tap.rope.straightened(tap.angles)
        elif tap.rope is not None and "position_ids" in kwargs:
            kwargs["position_ids"] = torch.zeros_like(kwargs["position_ids"])
        return AttentionBridge.forward(self.attn, *args, **kwargs)

    def _rows_of_joint(self, joint: Any) -> list[Tensor]:
        """Return which outputs of a joint projection are those of W_Q, W_K and W_V."""
        original = joint.original_component
        numbered, with_numbers = copy(original), copy(self.hf_attn)
        n = original.weight.shape[1 if type(original).__name__ == "Conv1D" else 0]
        bias = nn.Parameter(torch.arange(n, dtype=torch.float64), requires_grad=False)
        numbered._parameters = {"weight": original.weight, "bias": bias}
        with_numbers._modules = {**self.hf_attn._modules, joint.name: numbered}
        return [part.bias.long() for part in self.attn.split_qkv_matrix(with_numbers)]

    def _project(self, rows: list[Tensor], x: Tensor, *_: Any) -> Float[Tensor, "batch pos out"]:
        """Return what a joint projection does, from W_Q, W_K and W_V with their hook points."""
        q, k, v = self.attn.q(x), self.attn.k(x), self.attn.v(x)
        if k.ndim == v.ndim == 3:
            self.hf_attn.num_key_value_heads = self.n_kv_heads
            joint = x.new_empty(*x.shape[:2], sum(map(len, rows)))
            for part, where in zip((q, k, v), rows, strict=True):
                joint[..., where] = part
            return joint
        # A key or value head per query head: transformers' forward takes as many as it is told.
        k, v = (
            part if part.ndim == 4 else part.unflatten(-1, (-1, self.d_head)) for part in (k, v)
        )
        self.hf_attn.num_key_value_heads = self.n_heads
        k, v = (repeat_heads(part, self.n_heads).flatten(2) for part in (k, v))
        return torch.cat((q, k, v), -1)

    def norm_point(self, norm: NormName) -> str:
        # The projections' own input, whichever norms come before it.
        return "attn.hook_in" if norm == "ln1" else "ln2.hook_out"

    def norm_output(self, norm: NormName, tensor: Vectors) -> Vectors:
        return tensor

    def hooks_without_norm_weight(self, norm: NormName) -> Iterator[PlacedHook]:
        keep, write = keep_and_write()
        yield last(self.point(f"{norm}.hook_normalized"), keep)
        yield first(self.point(f"{norm}.hook_out"), write)

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
