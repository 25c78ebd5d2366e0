"""A block of a HookedTransformer: its attention, its norms' outputs, the layout of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from nope_probe.components import Projection
from nope_probe.hooks.layers.attached_hooks import PlacedHook, first
from nope_probe.hooks.layers.attention import Attention, Mask, unmasked
from nope_probe.hooks.layers.base_layer import Layer, NormName, Traits, Vectors
from nope_probe.hooks.layers.protocols import HookPoint
from nope_probe.hooks.layers.rotation import Rotary

# Options of TransformerLens that change the formula of attention beyond that of `_attend`.
OTHER_FORMULAS = ("use_logn_attn", "clip_qkv", "use_normalization_before_and_after")


class HookedLayer(Layer):
    """A block of a HookedTransformer."""

    kind = "HookedTransformer"
    attn_out_point = "hook_attn_out"
    masked = -torch.inf

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        if self.parallel or any(getattr(cfg, name, None) for name in OTHER_FORMULAS):
            raise NotImplementedError(
                "post-norm and parallel blocks, clipped and log-n attention are read through "
                "TransformerBridge, not HookedTransformer: load the model with nope_probe.load"
            )

    @property
    def attending(self) -> nn.Module:
        return self.attn

    @property
    def has_qk_norm(self) -> bool:
        return bool(self.cfg.use_qk_norm)

    @property
    def soft_cap(self) -> float | None:
        cap = getattr(self.cfg, "attn_scores_soft_cap", -1.0)
        return cap if cap and cap > 0 else None

    def attach_tap(self) -> None:
        vars(self.attn)["forward"] = self._attend

    def _attend(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: Any = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: object,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Attend as TransformerLens does, through the tap."""
        attn, cfg, tap = self.attn, self.cfg, self.tap
        q, k, v = attn.calculate_qkv_matrices(query_input, key_input, value_input)
        n_before, angles = 0, None
        if past_kv_cache_entry is not None:
            n_before = past_kv_cache_entry.past_keys.size(1)
            if k.shape[2] != v.shape[2] or k.shape[2] != past_kv_cache_entry.past_keys.shape[2]:
                raise ValueError(
                    "in this ablation there is a key or value head per query head, which no cache "
                    "of TransformerLens holds; pass whole sequences"
                )
            k, v = past_kv_cache_entry.append(k, v)
        if cfg.positional_embedding_type == "rotary":
            q = attn.apply_rotary(q, n_before, attention_mask)
            k = attn.apply_rotary(k, 0, attention_mask)
            angles = self._angles(q, n_before, attention_mask)
            if tap.rope is not None and n_before == 0:  # with a cache, the tap refuses
                q, k = (tap.rope.turned_back(x, angles) for x in (q, k))
            q, k = attn.hook_rot_q(q), attn.hook_rot_k(k)
        cells = q.new_zeros(1, 1, q.shape[1], k.shape[1])
        if cfg.attention_dir == "causal":
            cells = attn.apply_causal_mask(cells, n_before, attention_mask)
        if additive_attention_mask is not None:
            cells = cells + additive_attention_mask
        attention = Attention(
            q=q,
            k=k,
            v=v,
            mask=Mask.of(unmasked(cells)),
            scale=1.0 / float(attn.attn_scale),
            soft_cap=self.soft_cap,
            bias=self._alibi(q, k),
            sinks=attn.sinks if getattr(cfg, "use_attention_sinks", False) else None,
            angles=angles,
        )
        z = attn.hook_z(tap(attention))
        if cfg.use_attn_result:
            per_head = "batch pos head d_head, head d_head m -> batch pos head m"
            return attn.hook_result(einsum(z, attn.W_O, per_head)).sum(2) + attn.b_O
        return einsum(z, attn.W_O, "batch pos head d, head d m -> batch pos m") + attn.b_O

    def _alibi(self, q: Tensor, k: Tensor) -> Float[Tensor, "one head query_pos key_pos"] | None:
        if self.cfg.positional_embedding_type != "alibi":
            return None
        n = k.shape[1]
        alibi = type(self.attn).create_alibi_bias(self.n_heads, n, q.device)
        return alibi[None, :, n - q.shape[1] :]

    def _angles(
        self, q: Tensor, n_before: int, attention_mask: Tensor | None
    ) -> tuple[Float[Tensor, "one_or_batch pos pair"], Float[Tensor, "one_or_batch pos pair"]]:
        """Return cos and sin of every pair, as the image of its first coordinate."""
        first, second = self._pairs().T
        units = torch.zeros_like(q[:, :, :1] if attention_mask is not None else q[:1, :, :1])
        units[..., first] = 1
        turned = self.attn.apply_rotary(units, n_before, attention_mask)[:, :, 0]
        return turned[..., first], turned[..., second]

    def _pairs(self) -> Tensor:
        coordinates = torch.arange(self.cfg.rotary_dim or self.d_head)
        if self.cfg.rotary_adjacent_pairs:
            return coordinates.view(-1, 2)
        return coordinates.view(2, -1).T

    def traits(self) -> Traits:
        """Return the positional parts of the block's attention, from its configuration."""
        return Traits(
            rotary=self._rotary(),
            window=self.attn.attn_type == "local",
            sinks=bool(getattr(self.cfg, "use_attention_sinks", False)),
            alibi=self.cfg.positional_embedding_type == "alibi",
        )

    def _rotary(self) -> Rotary | None:
        if self.cfg.positional_embedding_type != "rotary":
            return None
        pairs = self._pairs()
        tables = self.attn.rotary_cos, self.attn.rotary_sin
        cos, sin = (table[:2, pairs.T[0]].double().cpu() for table in tables)
        return Rotary(
            frequencies=torch.atan2(sin[1], cos[1]),
            factor=float(cos[0, 0]),
            pairs=pairs,
            columns=torch.arange(len(pairs)),
        )

    def norm_point(self, norm: NormName) -> str:
        if self.has(f"{norm}.hook_normalized"):
            return f"{norm}.hook_normalized"
        return "hook_resid_pre" if norm == "ln1" else "hook_resid_mid"  # a model without norms

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

    def weight(self, name: Projection) -> nn.Parameter:
        return self._parameter("W", name)

    def weight_per_head(self, name: Projection) -> Float[Tensor, "head rows cols"]:
        return self.weight(name).detach()

    def bias_per_head(self, name: Projection) -> Float[Tensor, "head d_head"]:
        return self._parameter("b", name).detach()

    def _parameter(self, letter: Literal["W", "b"], name: Projection) -> nn.Parameter:
        grouped = self.cfg.n_key_value_heads is not None and name in ("w_k", "w_v")
        return getattr(self.attn, f"{'_' if grouped else ''}{letter}_{name[-1].upper()}")
