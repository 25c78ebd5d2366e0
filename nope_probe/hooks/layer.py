"""Layer: one block's hook points, the same on HookedTransformer and TransformerBridge.

Hook names are TransformerLens's own, without the `blocks.l.` in front. The two model kinds differ
in which of them fire, in what the attention input is called and in how a norm or a rotation is
applied; those differences live in this file and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformer_lens.hook_points import HookPoint


def unmasked(scores: Float[Tensor, "query_pos key_pos"]) -> Bool[Tensor, "query_pos key_pos"]:
    """Tell which cells a model left open.

    Masked ones are -inf on HookedTransformer and finfo.min on bridges. A NaN is open: it must show.
    """
    return ~(scores <= torch.finfo(scores.dtype).min / 2)


def summed_over_groups(
    q: Float[Tensor, "batch pos head d_head"], n_kv_heads: int
) -> Float[Tensor, "batch pos kv_head d_head"]:
    """Sum the queries that share a key head: the sum of their scores is one inner product."""
    return reduce(
        q, "batch pos (kv_head group) d_head -> batch pos kv_head d_head", "sum", kv_head=n_kv_heads
    )


class Layer(ABC):
    """One block of a model: its sizes, its hook points and the two steps between q and a score.

    Attributes:
        index: the block's number, from 0.
        n_heads, n_kv_heads, d_head, d_model: sizes.
        scale: what q.k is multiplied with to give a score (1/sqrt(d_head) as a rule).
        soft_cap: c of c*tanh(score/c), or None (Gemma-2 has one).
        input_point: the hook point that `attention_input` turns into Y, the projections' input.
        write_attn_out: the hook point at which the output of W_O is replaced.
    """

    index: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    scale: float
    soft_cap: float | None
    input_point: str
    write_attn_out: str

    def __init__(self, block: Any, index: int, cfg: Any) -> None:
        self.block, self.index, self.cfg = block, index, cfg
        self.n_heads, self.d_head, self.d_model = cfg.n_heads, cfg.d_head, cfg.d_model
        self.n_kv_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads

    def point(self, name: str) -> HookPoint:
        """Find a hook point by its TransformerLens name; a typo is an error that lists them all."""
        found = _descend(self.block, name)
        if not hasattr(found, "fwd_hooks"):
            names = [n for n, m in self.block.named_modules() if hasattr(m, "fwd_hooks")]
            raise KeyError(f"block {self.index} has no hook point {name!r}; it has {names}")
        return found

    def has(self, name: str) -> bool:
        """Tell whether the block has a hook point of this name."""
        return hasattr(_descend(self.block, name), "fwd_hooks")

    @property
    def adjacent(self) -> bool:
        """Whether RoPE turns the coordinates (2f, 2f + 1) together, and not (f, f + d_rotary/2)."""
        names = ("rotary_adjacent_pairs", "rotary_interleaved_cos_sin")
        return any(getattr(self.cfg, name, False) for name in names)

    @property
    def attn(self) -> Any:
        """The block's attention module."""
        return self.block.attn

    @abstractmethod
    def attention_input(
        self, seen: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Turn what `input_point` carries into Y, what W_Q, W_K and W_V read."""

    @abstractmethod
    def norm(
        self, x: Float[Tensor, "batch pos head d_head"], which: Literal["q", "k"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Apply the q-norm or k-norm, if the block has one."""

    @abstractmethod
    def rotate(
        self, x: Float[Tensor, "batch pos head d_head"], seen: dict[str, Tensor]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Apply RoPE as the block applied it in the pass that `seen` was recorded in."""

    @abstractmethod
    def weight(self, name: Literal["w_q", "w_k", "w_v", "w_o"]) -> nn.Parameter:
        """The parameter behind a projection, in the model's own layout."""

    def scores(
        self,
        q: Float[Tensor, "batch query_pos head d_head"],
        k: Float[Tensor, "batch key_pos kv_head d_head"],
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """Score every query against every key, scale and soft cap included; no mask."""
        k = repeat_heads(k, self.n_heads)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        if self.soft_cap is None:
            return scores
        return self.soft_cap * torch.tanh(scores / self.soft_cap)


class HookedLayer(Layer):
    """A block of a HookedTransformer."""

    input_point = "ln1.hook_normalized"
    write_attn_out = "hook_attn_out"

    def __init__(self, block: Any, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        if cfg.use_normalization_before_and_after or cfg.parallel_attn_mlp:
            raise NotImplementedError(
                "post-norm and parallel blocks are read through TransformerBridge, "
                "not HookedTransformer: load the model with nope_probe.load"
            )
        self.scale = 1.0 / float(block.attn.attn_scale)
        cap = getattr(cfg, "attn_scores_soft_cap", -1.0)
        self.soft_cap = cap if cap and cap > 0 else None

    def attention_input(self, seen: Tensor) -> Tensor:
        # hook_normalized leaves out the learned weight (and LayerNorm's bias).
        ln = self.block.ln1
        seen = seen.to(self.cfg.dtype)
        if hasattr(ln, "w"):
            seen = seen * ln.w
        return seen + ln.b if hasattr(ln, "b") else seen

    def norm(self, x: Tensor, which: Literal["q", "k"]) -> Tensor:
        if not self.cfg.use_qk_norm:
            return x
        module = self.attn.q_norm if which == "q" else self.attn.k_norm
        flat = module(rearrange(x, "batch pos head d_head -> (batch pos head) d_head"))
        return flat.view_as(x)

    def rotate(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        rotary = self.cfg.positional_embedding_type == "rotary"
        return self.attn.apply_rotary(x) if rotary else x

    def weight(self, name: Literal["w_q", "w_k", "w_v", "w_o"]) -> nn.Parameter:
        grouped = self.cfg.n_key_value_heads is not None and name in ("w_k", "w_v")
        return getattr(self.attn, ("_" if grouped else "") + name.upper())


class BridgeLayer(Layer):
    """A block of a TransformerBridge."""

    input_point = "attn.hook_in"
    write_attn_out = "attn.hook_out"

    def __init__(self, block: Any, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        hf = self.attn.original_component
        self.scale = float(getattr(hf, "scaling", None) or self.d_head**-0.5)
        if getattr(cfg, "scale_attn_by_inverse_layer_idx", False):
            self.scale /= index + 1
        self.soft_cap = getattr(hf, "attn_logit_softcapping", None)

    def attention_input(self, seen: Tensor) -> Tensor:
        return seen

    def norm(self, x: Tensor, which: Literal["q", "k"]) -> Tensor:
        module = self.attn._modules.get(f"{which}_norm")
        if module is None:
            return x
        if getattr(self.attn, "_qk_norm_phase", None) != "post_reshape":
            raise NotImplementedError("q/k-norm over all heads at once is not supported")
        x = rearrange(x, "batch pos head d_head -> batch head pos d_head")
        x = module.original_component(x)
        return rearrange(x, "batch head pos d_head -> batch pos head d_head")

    def rotate(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        if "hook_cos" not in seen:  # a NoPE layer: RoPE's hooks did not fire
            return x
        cos, sin = seen["hook_cos"], seen["hook_sin"]
        # Cohere's angles come twice running: 0 0 1 1, where the others' are 0 1 0 1.
        if getattr(self.cfg, "rotary_interleaved_cos_sin", False):
            cos, sin = (torch.cat([angles[..., ::2]] * 2, -1) for angles in (cos, sin))
        return rotated(x, cos, sin, self.adjacent)

    def weight(self, name: Literal["w_q", "w_k", "w_v", "w_o"]) -> nn.Parameter:
        return getattr(self.attn, name[-1]).original_component.weight


def layers_of(model: Any) -> list[Layer]:
    """Give a model's blocks as layers, for a HookedTransformer or a TransformerBridge."""
    if not hasattr(model, "blocks") or not hasattr(model, "cfg"):
        raise TypeError(
            f"expected a HookedTransformer or TransformerBridge, got {type(model).__name__}"
        )
    kind = BridgeLayer if is_bridge(model) else HookedLayer
    return [kind(block, index, model.cfg) for index, block in enumerate(model.blocks)]


def _descend(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def is_bridge(model: Any) -> bool:
    """Tell a TransformerBridge from a HookedTransformer."""
    return hasattr(model, "original_model")


def repeat_heads(
    x: Float[Tensor, "batch pos kv_head d_head"], n_heads: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Give each query head its own copy of the key head it shares."""
    return x if x.shape[2] == n_heads else x.repeat_interleave(n_heads // x.shape[2], dim=2)


def rotated(
    x: Float[Tensor, "batch pos head d_head"],
    cos: Float[Tensor, "one pos d_rotary"],
    sin: Float[Tensor, "one pos d_rotary"],
    adjacent: bool = False,
) -> Float[Tensor, "batch pos head d_head"]:
    """Rotate the first d_rotary coordinates of each head in pairs (f, f + d_rotary/2).

    With `adjacent`, the pairs are (2f, 2f + 1), as in GLM; cos and sin come in the first layout.
    """
    half = cos.shape[-1] // 2
    if adjacent:
        cos, sin = (t[..., :half].repeat_interleave(2, -1) for t in (cos, sin))
    cos, sin = cos[:, :, None], sin[:, :, None]
    turn, rest = x[..., : 2 * half], x[..., 2 * half :]
    if adjacent:
        turned = torch.stack((-turn[..., 1::2], turn[..., 0::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-turn[..., half:], turn[..., :half]), -1)
    return torch.cat((turn * cos + turned * sin, rest), -1)
