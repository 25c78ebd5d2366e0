"""A block of each kind of model: its attention, its norms' outputs, the layout of weights."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from copy import copy
from functools import partial
from typing import Any, cast

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import (
    Attention,
    AttentionMask,
    repeat_heads,
    unmasked,
    whole,
)
from nope_probe.hooks.layers.base_layer import (
    Layer,
    NormName,
    Traits,
    Vectors,
    fit_rotary,
    is_plain,
)
from nope_probe.hooks.layers.hook_points import HookPoint, PlacedHook, first, last
from nope_probe.hooks.layers.inline_attention import attend_inline
from nope_probe.hooks.layers.tap import FUSED, NAME, current, register
from nope_probe.removal import Projection


class HookedLayer(Layer):
    """A block of a HookedTransformer."""

    kind = "HookedTransformer"
    attn_out_point = "hook_attn_out"
    masked = -torch.inf

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        adds_positions = cfg.positional_embedding_type == "shortformer"  # to queries and keys
        other_formula = cfg.use_logn_attn or cfg.clip_qkv or cfg.use_normalization_before_and_after
        if adds_positions or self.parallel or other_formula:
            raise NotImplementedError(
                "post-norm and parallel blocks, clipped and log-n attention are read through "
                "TransformerBridge (nope_probe.load), and shortformer's positions not at all"
            )

    def _attend(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Attend as TransformerLens does, through the tap."""
        attn, cfg, tap = self.attn, self.cfg, self.tap
        q, k, v = attn.calculate_qkv_matrices(query_input, key_input, value_input)
        n_before, angles, cap = 0, None, cfg.attn_scores_soft_cap
        if past_kv_cache_entry is not None:
            n_before = past_kv_cache_entry.past_keys.size(1)
            if k.shape[2] != v.shape[2] or k.shape[2] != past_kv_cache_entry.past_keys.shape[2]:
                raise UserError(
                    "in this ablation each query head has a key or value head: pass whole sequences"
                )
            k, v = past_kv_cache_entry.append(k, v)
        if cfg.positional_embedding_type == "rotary":
            q = attn.apply_rotary(q, n_before, attention_mask)
            k = attn.apply_rotary(k, 0, attention_mask)
            angles = self._angles(n_before, q.shape[1], attention_mask)
            rope = tap.edits.rope
            if rope is not None and n_before == 0:  # with a cache, the tap refuses
                q, k = (rope.turned_back(x, angles) for x in (q, k))
            q, k = attn.hook_rot_q(q), attn.hook_rot_k(k)
        alibi, n_keys = None, k.shape[1]
        if cfg.positional_embedding_type == "alibi":
            alibi = type(attn).create_alibi_bias(self.n_heads, n_keys, q.device)[None, :, n_before:]
        cells = q.new_zeros(1, 1, q.shape[1], n_keys)
        if cfg.attention_dir == "causal":
            cells = attn.apply_causal_mask(cells, n_before, attention_mask)
        attention = Attention(
            q=q,
            k=k,
            v=v,
            mask=AttentionMask.of(unmasked(cells)),
            scale=1.0 / float(attn.attn_scale),
            soft_cap=cap if cap > 0 else None,
            bias=alibi,
            sinks=attn.sinks if cfg.use_attention_sinks else None,
            angles=angles,
        )
        z = attn.hook_z(tap(attention))
        if cfg.use_attn_result:
            per_head = "batch pos head d_head, head d_head m -> batch pos head m"
            return attn.hook_result(einsum(z, attn.W_O, per_head)).sum(2) + attn.b_O
        return einsum(z, attn.W_O, "batch pos head d, head d m -> batch pos m") + attn.b_O

    def _angles(
        self, n_before: int, n_queries: int, real: Tensor | None
    ) -> tuple[Float[Tensor, "one_or_batch pos col"], Float[Tensor, "one_or_batch pos col"]]:
        """Return cos and sin as `apply_rotary` has used them; padding is not counted."""
        positions = torch.arange(n_before + n_queries)[None]
        if real is not None:
            positions = (real.cumsum(1) - 1).clamp(min=0)
        tables = self.attn.rotary_cos, self.attn.rotary_sin
        cos, sin = (table[positions[:, n_before:].to(table.device)] for table in tables)
        return cos, sin

    def traits(self) -> Traits:
        """Return the positional parts of the block's attention, as it is configured."""
        rotary = None
        if self.cfg.positional_embedding_type == "rotary":
            vector = torch.arange(1.0, 1 + self.d_head, device=self.attn.rotary_cos.device)
            ((straight, turned),) = self.attn.apply_rotary(vector.expand(1, 2, 1, -1))
            rotary = fit_rotary(self._angles(0, 2, None), turned, straight)
        return Traits(
            rotary=rotary,
            window=self.attn.attn_type == "local",
            sinks=self.cfg.use_attention_sinks,
            alibi=self.cfg.positional_embedding_type == "alibi",
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
        grouped = self.cfg.n_key_value_heads is not None and name in ("w_k", "w_v")
        return getattr(self.attn, f"{'_' if grouped else ''}W_{name[-1].upper()}")

    def weight_per_head(self, name: Projection) -> Float[Tensor, "head rows cols"]:
        return self.weight(name).detach()


class JointRows(nn.Linear):
    """The rows of a joint projection that belong to one of the projections in it.

    TransformerLens splits a joint projection into copies. These follow its weights, and their
    gradients are its gradients.

    Args:
        joint: a Linear, or a Conv1D, whose weight is [in, out].
        rows: the numbers of its outputs.
    """

    def __init__(self, joint: nn.Module, rows: Int[Tensor, " out"]) -> None:
        nn.Module.__init__(self)
        together = slice(int(rows[0]), int(rows[-1]) + 1)  # whose weight is a view
        is_slice = torch.equal(torch.arange(together.start, together.stop), rows)
        self.rows = together if is_slice else rows
        self.joint: Any = [joint]  # no submodule, because it is a module of the block already
        self.out_features, self.in_features = self.weight.shape

    @property
    def weight(self) -> Float[Tensor, "out in"]:  # type: ignore[override]
        weight = self.joint[0].weight
        return (weight.T if type(self.joint[0]).__name__ == "Conv1D" else weight)[self.rows]

    @property
    def bias(self) -> Float[Tensor, " out"] | None:  # type: ignore[override]
        bias = self.joint[0].bias
        return None if bias is None else bias[self.rows]


@torch.no_grad()
def _multiplied_by(linear: nn.Module, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """Return the matrix by which a module multiplies: an adapter's too, or unpacked."""
    device = next(linear.parameters()).device
    basis = torch.eye(cast(Any, linear).in_features, dtype=dtype, device=device)
    training = [module for module in linear.modules() if module.training]
    for module in training:  # an adapter's dropout
        module.training = False
    try:
        return (linear.forward(basis) - linear.forward(-basis)).T / 2
    finally:
        for module in training:
            module.training = True


# The classes of attention whose forward pass fixes the number of key and value heads.
FIXED_KEY_HEADS = ("FalconAttention", "GPTBigCodeAttention", "StableLmAttention")
_ROWS: dict[Hashable, list[Tensor]] = {}  # rows of joint projections, by attention's kind and size


class BridgeLayer(Layer):
    """A block of a TransformerBridge."""

    kind = "TransformerBridge"

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        super().__init__(block, index, cfg)
        self.whole_attn: Any = self.attn.original_component
        self.attending = self.whole_attn._modules.get("self", self.whole_attn)  # BERT's is within
        code = sys.modules[type(self.attending).__module__]
        # Whether transformers looks up this block's attention function by name.
        self.uses_interface = hasattr(code, "ALL_ATTENTION_FUNCTIONS")
        config = getattr(self.attending, "config", None)
        # Whether each block stores keys for others, or reuses those of the last of its type.
        modes = getattr(config, "kv_sharing_modes", None) or [None] * cfg.n_layers
        self.shares_keys = modes[index] is not None
        if modes[index] == "reuse":
            types = self.attending.config.layer_types
            stored = [number for number in range(index) if modes[number] == "store"]
            self.source_of_keys = max(n for n in stored if types[n] == types[index])
        d_head = getattr(self.attending, "head_dim", None)
        width = getattr(getattr(self.attn, "k", None), "out_features", None)
        n_groups = getattr(self.attending, "num_key_value_groups", None)
        if isinstance(d_head, int) and width:  # they may differ between the layers (Gemma 4)
            self.d_head, self.n_kv_heads = d_head, width // d_head
        elif isinstance(d_head, int) and n_groups and self.source_of_keys is not None:
            self.d_head, self.n_kv_heads = d_head, self.n_heads // n_groups
        w_o = getattr(getattr(self.attn, "o", None), "original_component", None)
        if w_o is not None:
            n_rows = getattr(w_o, "in_features", None) or w_o.weight.numel() // self.d_model
            self.d_value = n_rows // self.n_heads
        self.joint: Any = self.attn._modules.get("qkv")  # the projection of queries, keys, values
        # BLOOM's attention adds the residual stream itself, after W_O.
        self.attn_out_point = "attn.o.hook_out" if self.has("attn.o.hook_out") else "attn.hook_out"

    def attach_for_good(self, implementation: str) -> None:
        """Let the block attend through its tap from now on, in place of an implementation."""
        if self.joint is not None:
            for letter, rows in zip("qkv", self._rows_of_joint(), strict=True):
                projection = JointRows(self.joint.original_component, rows)
                getattr(self.attn, letter).set_original_component(projection)
        self.attach_tap(NAME if implementation == "eager" else FUSED)

    def attach_tap(self, name: str = NAME) -> None:
        super().attach_tap()
        register()
        if self.uses_interface:
            self.attending.config._attn_implementation = name
        for bridge in self.attn.submodules.values():
            # GPT-2's o is next to transformers' module, not in its place.
            if self.attending._modules.get(bridge.name) is bridge.original_component:
                self.attending._modules[bridge.name] = bridge
        if self.joint is not None:
            vars(self.joint)["forward"] = partial(self._project, self._rows_of_joint())

    def detach_tap(self) -> None:
        super().detach_tap()
        if self.uses_interface:
            self.attending.config._attn_implementation = "eager"
        if self.joint is not None:
            del vars(self.joint)["forward"]

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' attention, in which q, k, v and o have their hook points."""
        tap, attn = self.tap, self.attn
        # Where attention itself makes angles from positions, pass on the positions.
        name = "position_embeddings" if "position_embeddings" in kwargs else "position_ids"
        current.angles = kwargs.get(name)
        rope = tap.edits.rope
        if rope is not None and current.angles is not None:
            kwargs[name] = rope.straightened(current.angles)
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = attn.hook_in(kwargs["hidden_states"])
        else:
            args = (attn.hook_in(args[0]), *args[1:])
        if self.uses_interface:
            output = self.whole_attn(*args, **kwargs)
        else:
            output = attend_inline(tap, self.n_heads, self.attending, args, kwargs)
        if isinstance(output, Tensor):
            return attn.hook_out(output)
        first, *rest = output  # the tap returns no attention weights
        return type(output)([attn.hook_out(first), *[None for _ in rest[:1]], *rest[1:]])

    @torch.inference_mode(False)  # kept rows must not bar gradients later
    def _rows_of_joint(self) -> list[Tensor]:
        """Return the numbers of a joint projection's outputs that belong to W_Q, W_K and W_V.

        TransformerLens splits a copy whose weights are the numbers of their rows.
        """
        original = self.joint.original_component
        size = type(self.attending), self.n_heads, self.n_kv_heads, self.d_head, self.d_model
        if size not in _ROWS:
            numbered, with_numbers = copy(original), copy(self.attending)
            is_conv = type(original).__name__ == "Conv1D"
            n = original.weight.shape[1 if is_conv else 0]
            rows = torch.arange(n, dtype=torch.float32)
            weight = (rows if is_conv else rows[:, None]).expand_as(original.weight)
            numbered._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
            numbered._parameters["bias"] = nn.Parameter(rows, requires_grad=False)
            with_numbers._modules = {**self.attending._modules, self.joint.name: numbered}
            parts = self.attn.split_qkv_matrix(with_numbers)
            _ROWS[size] = [part.weight[:, 0].long() for part in parts]
        return _ROWS[size]

    def _project(self, rows: list[Tensor], x: Tensor, *_: Any) -> Float[Tensor, "batch pos out"]:
        """Return a joint projection's output, from W_Q, W_K and W_V with their hook points."""
        q, k, v = self.attn.q(x), self.attn.k(x), self.attn.v(x)
        if k.ndim == v.ndim == 3:
            self.attending.num_key_value_heads = self.n_kv_heads
            joint = x.new_empty(*x.shape[:2], sum(map(len, rows)))
            for part, where in zip((q, k, v), rows, strict=True):
                joint[..., where] = part
            return joint
        # With a key or value head per query head, transformers' forward has to learn their number.
        k, v = (
            part if part.ndim == 4 else part.unflatten(-1, (-1, self.d_head)) for part in (k, v)
        )
        self.attending.num_key_value_heads = self.n_heads
        k, v = (repeat_heads(part, self.n_heads).flatten(2) for part in (k, v))
        return torch.cat((q, k, v), -1)

    def output_point(self, name: Projection) -> str:
        return self.attn_out_point if name == "w_o" else f"attn.{name[-1]}.hook_out"

    def why_not_replaced(self, name: Projection) -> str | None:
        if self.source_of_keys is not None and name in ("w_k", "w_v"):
            return None  # it is removed with the other block's
        if not self.has_matrix(name):
            return "it is no separate matrix (as in multi-head latent attention)"
        linear = self._linear(name)
        n_rows = getattr(linear, "out_features", None) or linear.weight.numel() // self.d_model
        if name == "w_q" and n_rows != self.n_heads * self.d_head:
            return "its matrix also makes the gates of attention's output"
        if name == "w_k" and self.n_kv_heads < self.n_heads and self._norms_all_keys:
            return "a norm is over all key heads, of which there are fewer than query heads"
        is_fixed = type(self.attending).__name__ in FIXED_KEY_HEADS
        if name in ("w_k", "w_v") and self.n_kv_heads < self.n_heads and is_fixed:
            return "transformers computes this family with shared key and value heads only"
        return None

    @property
    def _norms_all_keys(self) -> bool:
        """Whether a norm is over several key heads at once, by the shape of its weight."""
        norm = getattr(self.attending, "k_norm", None) or getattr(
            self.attending, "k_layernorm", None
        )
        shape = getattr(getattr(norm, "weight", None), "shape", None)
        return self.n_kv_heads > 1 and shape == (self.n_kv_heads * self.d_head,)

    def norm_point(self, norm: NormName) -> str:
        # The input of the projections, whichever norms come before it.
        return "attn.hook_in" if norm == "ln1" else "ln2.hook_out"

    def norm_output(self, norm: NormName, tensor: Vectors) -> Vectors:
        return tensor

    def hooks_without_norm_weight(self, norm: NormName) -> Iterator[PlacedHook]:
        kept = list[Tensor]()

        def keep(tensor: Tensor, hook: HookPoint) -> None:
            kept[:] = [tensor]

        def write(tensor: Tensor, hook: HookPoint) -> Tensor:
            return kept.pop().to(tensor.dtype)

        yield last(self.point(f"{norm}.hook_normalized"), keep)
        yield first(self.point(f"{norm}.hook_out"), write)

    def weight(self, name: Projection) -> Tensor:
        linear = self._linear(name)
        return whole(linear.weight) if is_plain(linear) else _multiplied_by(linear, self.dtype)

    def weight_per_head(self, name: Projection) -> Float[Tensor, "head rows cols"]:
        weight = self.weight(name).detach()
        if type(self._linear(name)).__name__ == "Conv1D":  # of GPT-2, stored as [in, out]
            weight = weight.T
        if name == "w_o":
            return rearrange(weight, "m (head h) -> head h m", head=self.n_heads)
        return rearrange(weight, "(head h) m -> head m h", h=self.d_head)

    def _linear(self, name: Projection) -> Any:
        return getattr(self.attn, name[-1]).original_component
