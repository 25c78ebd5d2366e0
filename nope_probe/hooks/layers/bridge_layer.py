"""A block of a TransformerBridge: its attention, its norms' outputs, the layout of weights."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
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
from nope_probe.hooks.layers.tap import NAME, attend_inline, register

# The classes of attention whose forward pass fixes the number of key and value heads.
FIXED_KEY_HEADS = ("FalconAttention", "GPTBigCodeAttention", "StableLmAttention")
_ROWS: dict[Hashable, list[Tensor]] = {}  # rows of joint projections, by attention's kind and size


class BridgeLayer(Layer):
    """A block of a TransformerBridge."""

    kind = "TransformerBridge"

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        hf_attn: Any = self.attn.original_component
        self.whole_attn = hf_attn
        self.hf_attn: Any = hf_attn._modules.get("self", hf_attn)  # BERT's W_O is outside of it
        d_head = getattr(self.hf_attn, "head_dim", None)
        width = getattr(getattr(self.attn, "k", None), "out_features", None)
        if isinstance(d_head, int) and width:  # they may differ between the layers (Gemma 4)
            self.d_head, self.n_kv_heads = d_head, width // d_head
        w_o = getattr(getattr(self.attn, "o", None), "original_component", None)
        if w_o is not None:
            self.d_value = w_o.weight.numel() // self.d_model // self.n_heads
        # BLOOM's attention adds the residual stream itself, after W_O.
        self.attn_out_point = "attn.o.hook_out" if self.has("attn.o.hook_out") else "attn.hook_out"

    @property
    def attending(self) -> nn.Module:
        return self.hf_attn

    @property
    def uses_interface(self) -> bool:
        """Whether transformers looks up this block's attention function by name."""
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
        if self.uses_interface:
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
        if self.uses_interface:
            self.hf_attn.config._attn_implementation = "eager"
        joint = self.attn._modules.get("qkv")
        if joint is not None:
            del vars(joint)["forward"]

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' own attention, in which q, k, v and o have their hook points."""
        tap, attn = self.tap, self.attn
        # Where attention itself makes angles from positions, pass on the positions.
        name = "position_embeddings" if "position_embeddings" in kwargs else "position_ids"
        tap.angles = kwargs.get(name)
        if tap.rope is not None and tap.angles is not None:
            kwargs[name] = tap.rope.straightened(tap.angles)
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = attn.hook_in(kwargs["hidden_states"])
        else:
            args = (attn.hook_in(args[0]), *args[1:])
        if self.uses_interface:
            output = self.whole_attn(*args, **kwargs)
        else:
            output = attend_inline(tap, self.n_heads, self.hf_attn, args, kwargs)
        if isinstance(output, Tensor):
            return attn.hook_out(output)
        first, *rest = output  # the tap returns no attention weights
        return type(output)([attn.hook_out(first), *[None for _ in rest[:1]], *rest[1:]])

    @torch.inference_mode(False)  # kept rows must not bar gradients later
    def _rows_of_joint(self, joint: Any) -> list[Tensor]:
        """Return the numbers of a joint projection's outputs that belong to W_Q, W_K and W_V.

        TransformerLens splits a copy whose weights are the numbers of their rows.
        """
        original = joint.original_component
        size = type(self.hf_attn), self.n_heads, self.n_kv_heads, self.d_head, self.d_model
        if size not in _ROWS:
            numbered, with_numbers = copy(original), copy(self.hf_attn)
            is_conv = type(original).__name__ == "Conv1D"
            n = original.weight.shape[1 if is_conv else 0]
            rows = torch.arange(n, dtype=torch.float32)
            weight = (rows if is_conv else rows[:, None]).expand_as(original.weight)
            numbered._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
            numbered._parameters["bias"] = nn.Parameter(rows, requires_grad=False)
            with_numbers._modules = {**self.hf_attn._modules, joint.name: numbered}
            parts = self.attn.split_qkv_matrix(with_numbers)
            _ROWS[size] = [part.weight[:, 0].long() for part in parts]
        return _ROWS[size]

    def _project(self, rows: list[Tensor], x: Tensor, *_: Any) -> Float[Tensor, "batch pos out"]:
        """Return a joint projection's output, from W_Q, W_K and W_V with their hook points."""
        q, k, v = self.attn.q(x), self.attn.k(x), self.attn.v(x)
        if k.ndim == v.ndim == 3:
            self.hf_attn.num_key_value_heads = self.n_kv_heads
            joint = x.new_empty(*x.shape[:2], sum(map(len, rows)))
            for part, where in zip((q, k, v), rows, strict=True):
                joint[..., where] = part
            return joint
        # With a key or value head per query head, transformers' forward has to learn their number.
        k, v = (
            part if part.ndim == 4 else part.unflatten(-1, (-1, self.d_head)) for part in (k, v)
        )
        self.hf_attn.num_key_value_heads = self.n_heads
        k, v = (repeat_heads(part, self.n_heads).flatten(2) for part in (k, v))
        return torch.cat((q, k, v), -1)

    def output_point(self, name: Projection) -> str:
        return self.attn_out_point if name == "w_o" else f"attn.{name[-1]}.hook_out"

    def why_not_replaced(self, name: Projection) -> str | None:
        if not self.has_matrix(name):
            return "it is no matrix of its own (as in multi-head latent attention)"
        n_rows = self.weight(name).numel() // self.d_model
        if name == "w_q" and n_rows != self.n_heads * self.d_head:
            return "its matrix also makes the gates of attention's output"
        if name == "w_k" and self.n_kv_heads < self.n_heads and self._norms_all_keys:
            return "a norm is over all key heads, of which there are fewer than query heads"
        is_fixed = type(self.hf_attn).__name__ in FIXED_KEY_HEADS
        if name in ("w_k", "w_v") and self.n_kv_heads < self.n_heads and is_fixed:
            return "transformers computes this family with shared key and value heads only"
        return None

    @property
    def _norms_all_keys(self) -> bool:
        norm = getattr(self.hf_attn, "k_norm", None) or getattr(self.hf_attn, "k_layernorm", None)
        weight = getattr(norm, "weight", None)
        return weight is not None and weight.shape == (self.n_kv_heads * self.d_head,)

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
            return rearrange(weight, "m (head h) -> head h m", head=self.n_heads)
        return rearrange(weight, "(head h) m -> head m h", h=self.d_head)

    def bias_per_head(self, name: Projection) -> Float[Tensor, "head d_head"] | None:
        bias = self._linear(name).bias
        return None if bias is None else bias.detach().view(-1, self.d_head)

    def _linear(self, name: Projection) -> Any:
        return getattr(self.attn, name[-1]).original_component
