"""Attention in line: families that do not look up an attention function reach the tap by this.

BLOOM, CodeGen, Falcon, GPT-J, GPT-Neo, MPT, OpenAI's GPT and XGLM multiply queries with keys, take
the softmax and multiply with values in line. While their forward pass runs, these three calls of
PyTorch are answered by `InlineAttention`: the first shows q and k, the second the sum of their
product and a mask or ALiBi, and the third v. Falcon may make one call of fused attention instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import Attention, AttentionMask, unmasked
from nope_probe.hooks.layers.tap import Tap, current

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
OPENAI = -1e4  # the score of a later key in OpenAI's GPT, which has no bias; in others finfo.min


class _Added(Exception):  # noqa: N818  (it ends a forward pass early, it is no error)
    """Carries the tensor that was added to a product."""


class InlineAttention(TorchFunctionMode):
    """Answers the three calls of one forward pass of attention, or the one of fused attention.

    Args:
        tap: computes attention.
        n_heads: how many query heads there are.
        product: the value given for every q.k, in a pass that ends before the softmax; None to
            attend.
        drops: whether the model may drop weights, as in training.
    """

    def __init__(
        self, tap: Tap, n_heads: int, *, product: float | None = None, drops: bool = False
    ) -> None:
        super().__init__()
        self.tap, self.n_heads, self.drops = tap, n_heads, drops
        self.product, self.ends = product or 0.0, product is not None
        self.q: Tensor | None = None
        self.k: Tensor | None = None
        self.added: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._fused(*args, **options)
        if name == "softmax":
            self.added = args[0]
            if self.ends:
                raise _Added
            # What the model multiplies the weights by, as dropout does, is left in the ones.
            return torch.ones_like(self.added, dtype=options.get("dtype"))
        if name in PRODUCTS:
            is_biased = name == "baddbmm"
            left: Tensor = options["batch1"] if is_biased else args[0]
            right: Tensor = options["batch2"] if is_biased else args[1]
            if min(left.ndim, right.ndim) > 2:  # else a projection
                if self.added is not None:
                    return self._values(left, right)
                self.q, self.k = left, right.mT
                products = left.new_full((*left.shape[:-1], right.shape[-1]), self.product)
                if not is_biased:
                    return products
                return options["beta"] * args[0] + options["alpha"] * products
        return func(*args, **options)

    def _fused(
        self,
        q: Float[Tensor, "batch head query_pos d_head"],
        k: Float[Tensor, "batch kv_head key_pos d_head"],
        v: Float[Tensor, "batch kv_head key_pos d_value"],
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Answer a call of PyTorch's fused attention."""
        n_queries, n_keys = q.shape[2], k.shape[2]
        if attn_mask is None:
            make = AttentionMask.causal if is_causal else AttentionMask.full
            attn_mask = make(n_queries, n_keys, q.device).rows()
        if attn_mask.dtype == torch.bool:
            added = q.new_zeros(attn_mask.shape)
            attn_mask = added.masked_fill_(~attn_mask, torch.finfo(q.dtype).min)
        self.q, self.k = q, k
        self.added = attn_mask + self.product * (q.shape[-1] ** -0.5 if scale is None else scale)
        if self.ends:
            raise _Added
        return self._values(q, v)

    def _values(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return the values weighted by attention, in the layout of the call."""
        assert self.q is not None
        assert self.k is not None
        assert self.added is not None
        assert self.tap.scale is not None
        added = self._by_head(self.added)
        # CodeGen scales the mask with the scores.
        visible = unmasked(added.to(v.dtype) / min(self.tap.scale, 1.0))
        by_openai = added == OPENAI
        if bool((~visible | by_openai | (added == 0)).all()):
            visible &= ~by_openai
        bias = added.masked_fill(~visible, 0)
        of_keys = bias[:, :, -1:]  # ALiBi adds a number per key, to masked cells too
        if torch.equal(bias, of_keys.masked_fill(~visible, 0)):
            bias = of_keys.expand_as(bias)
        attention = Attention(
            q=self._by_head(self.q).transpose(1, 2),
            k=self._by_head(self.k).transpose(1, 2),
            v=self._by_head(v).transpose(1, 2),
            mask=AttentionMask.of(visible[:, :1]),
            scale=self.tap.scale,
            bias=bias if bool(bias.any()) else None,
            angles=current.angles,
        )
        factors = self._by_head(weights) if self.drops else 0.0
        z = self.tap(attention, factors).transpose(1, 2).to(v.dtype)
        return z.flatten(0, 1) if weights.ndim == 3 else z.contiguous()

    def _by_head(self, tensor: Tensor) -> Float[Tensor, "batch head row col"]:
        return tensor.unflatten(0, (-1, self.n_heads)) if tensor.ndim == 3 else tensor


def attend_inline(
    tap: Tap,
    n_heads: int,
    attend: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module's forward pass of attention through the tap."""
    if tap.scale is None:
        caches = dict.fromkeys({"layer_past", "past_key_values"} & {*kwargs})
        without, with_ones = (
            _added(InlineAttention(tap, n_heads, product=product), attend, args, kwargs | caches)
            for product in (0.0, 1.0)
        )
        cell = without.abs().argmin()  # a cell to which nothing is added
        tap.scale = float((with_ones - without).flatten()[cell])
    with InlineAttention(tap, n_heads, drops=attend.training):
        return attend(*args, **kwargs)


def _added(
    mode: InlineAttention, attend: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return the input of a forward pass's softmax."""
    with suppress(_Added), mode:
        attend(*args, **kwargs)
    if mode.added is None:
        raise UserError(
            "a kernel computes the model's attention and shows no scores: make the model with "
            "attn_implementation='eager'"
        )
    return mode.added.double()
