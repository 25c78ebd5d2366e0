"""The blocks of a HookedTransformer and of a TransformerBridge, read and written in the same way.

The two kinds of model differ in which hook points fire, in what a norm's hook point carries and in
the layout of weights. What differs between blocks is in this file, what differs between whole
models in `hooks/model.py`; no other file asks which kind a model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from nope_probe.hooks.attention import rotated, unmasked
from nope_probe.hooks.base_layer import (
    Attend,
    Heads,
    Layer,
    NormName,
    QueryOrKey,
    Vectors,
    Visible,
)
from nope_probe.hooks.names import Projection
from nope_probe.hooks.placed import PlacedHook, first, last
from nope_probe.hooks.protocols import Hook, HookedModel, HookPoint
from nope_probe.hooks.rope_bands import RemovedPairs

# Settings of TransformerLens under which other hook points of attention fire.
_OPTIONS = (
    "use_attn_result",
    "use_split_qkv_input",
    "use_attn_in",
    "gated_q_proj",
    "use_logn_attn",
)


def layers_of(model: HookedModel) -> list[Layer]:
    """Return a model's blocks.

    Raises:
        TypeError: for anything else than a HookedTransformer or TransformerBridge.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None or not hasattr(model, "cfg"):
        raise TypeError(
            f"expected a HookedTransformer or TransformerBridge, got {type(model).__name__}"
        )
    kind = BridgeLayer if is_bridge(model) else HookedLayer
    return [kind(block, index, model.cfg) for index, block in enumerate(blocks)]


def is_bridge(model: HookedModel) -> bool:
    """Return whether a model is a TransformerBridge, not a HookedTransformer."""
    return hasattr(model, "original_model")


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
            keep, write = carry(partial(self._unrotated, which=which, rope=rope))
            yield last(self.point(f"attn.hook_{which}"), keep)
            yield first(self.point(f"attn.hook_rot_{which}"), write)

    def _unrotated(self, x: Heads, turned: Heads, which: QueryOrKey, rope: RemovedPairs) -> Heads:
        """Return the rotated q or k with some pairs as they were before, after q/k-norm."""
        columns = self.rotary_columns(rope.mask(x.shape[1])).to(x.device)
        return torch.where(columns, self.qk_norm(x, which), turned)

    def frequencies(self, fired: dict[str, Tensor]) -> Float[Tensor, " pair"] | None:
        if "hook_rot_q" not in fired:
            return None
        cos, sin = self.attn.rotary_cos[1].double(), self.attn.rotary_sin[1].double()
        return _per_pair(torch.atan2(sin, cos), self.adjacent)

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

    def rotate(self, x: Heads, fired: dict[str, Tensor]) -> Heads:
        rotary = self.cfg.positional_embedding_type == "rotary"
        return self.attn.apply_rotary(x) if rotary else x

    @property
    def has_plain_attention(self) -> bool:
        return self.soft_cap is None and not any(
            getattr(self.cfg, each, False) for each in _OPTIONS
        )

    def fused_forward(self, attend: Attend) -> Callable[..., Any]:
        attn, rotary = self.attn, self.cfg.positional_embedding_type == "rotary"

        def forward(
            query_input: Tensor, key_input: Tensor, value_input: Tensor, **_: Any
        ) -> Tensor:
            q, k, v = attn.calculate_qkv_matrices(query_input, key_input, value_input)
            if rotary:
                q, k = attn.hook_rot_q(attn.apply_rotary(q)), attn.hook_rot_k(attn.apply_rotary(k))
            z = attn.hook_z(attend(q, k, v, self._visible(q)))
            return torch.einsum("bqhd,hdm->bqm", z, attn.W_O) + attn.b_O

        return forward

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
        self.scale = float(getattr(self.hf_attn, "scaling", None) or self.d_head**-0.5)
        if getattr(cfg, "scale_attn_by_inverse_layer_idx", False):
            self.scale /= index + 1
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
        keep, write = carry()
        yield last(self.point(f"{norm}.hook_normalized"), keep)
        yield first(self.point(f"{norm}.hook_out"), write)

    def hooks_without_rope(self, rope: RemovedPairs) -> Iterator[PlacedHook]:
        def write(tensor: Tensor, hook: HookPoint, value: float) -> Tensor:
            pairs = rope.mask(tensor.shape[1]).to(tensor.device)
            columns = pairs.repeat_interleave(2) if self._angles_twice else pairs.repeat(2)
            return tensor.masked_fill(columns, value)

        if self.has("attn.hook_cos"):
            yield first(self.point("attn.hook_cos"), partial(write, value=1.0))
            yield first(self.point("attn.hook_sin"), partial(write, value=0.0))

    def frequencies(self, fired: dict[str, Tensor]) -> Float[Tensor, " pair"] | None:
        if "hook_cos" not in fired:  # a NoPE layer: RoPE's hooks did not fire
            return None
        cos, sin = fired["hook_cos"][0, 1].double(), fired["hook_sin"][0, 1].double()
        return _per_pair(torch.atan2(sin, cos), self._angles_twice)

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

    def rotate(self, x: Heads, fired: dict[str, Tensor]) -> Heads:
        if "hook_cos" not in fired:  # a NoPE layer: RoPE's hooks did not fire
            return x
        cos, sin = fired["hook_cos"], fired["hook_sin"]
        if self._angles_twice:
            cos, sin = (torch.cat([angles[..., ::2]] * 2, -1) for angles in (cos, sin))
        return rotated(x, cos, sin, self.adjacent)

    @property
    def has_plain_attention(self) -> bool:
        options = any(getattr(self.cfg, each, False) for each in _OPTIONS)
        known = all(hasattr(self.attn, name) for name in ("q", "k", "v", "o"))
        return known and not options and self.soft_cap is None and not self.has_sinks

    def fused_forward(self, attend: Attend) -> Callable[..., Any]:
        attn = self.attn

        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
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

        return forward

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


def carry(change: Callable[[Tensor, Tensor], Tensor] | None = None) -> tuple[Hook, Hook]:
    """Return a hook that keeps a tensor, and one that writes it at a later hook point.

    With `change`, what is written is made from the earlier tensor and from the later one.
    """
    kept: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        kept[:] = [tensor]

    def write(tensor: Tensor, hook: HookPoint) -> Tensor:
        earlier = kept.pop()
        return (earlier if change is None else change(earlier, tensor)).to(tensor.dtype)

    return keep, write


def _per_pair(angles: Float[Tensor, " d_rotary"], twice: bool) -> Float[Tensor, " pair"]:
    """Return one angle per pair from those of all coordinates, 0 0 1 1 or 0 1 0 1."""
    return (angles[::2] if twice else angles[: len(angles) // 2]).cpu()
