"""Attention of the few families that do not look up by name what computes it.

BLOOM, CodeGen, Falcon, GPT-J, GPT-Neo, MPT, OpenAI's GPT and XGLM multiply queries with keys, take
the softmax and multiply with values in line. While their forward pass runs, these three calls of
PyTorch are answered here: the first shows q and k, the second what is added to their product (a
mask, ALiBi), and the third v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nope_probe.hooks.layers.attention import Attention, Mask
from nope_probe.hooks.layers.tap import Tap

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
MASKED = -9e3  # what a mask adds is below; a bias is above


class _Added(Exception):  # noqa: N818  (it ends a forward pass early, it is no error)
    """Carries what was added to a product."""


class InlineAttention(TorchFunctionMode):
    """Answers the three calls of one forward pass of attention.

    Args:
        tap: computes attention.
        n_heads: how many query heads there are.
        product: what stands for each q.k; a pass ends before the softmax unless it is 0.
    """

    def __init__(self, tap: Tap, n_heads: int, product: float = 0.0, *, ends: bool = False) -> None:
        super().__init__()
        self.tap, self.n_heads, self.product, self.ends = tap, n_heads, product, ends
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
        if name == "softmax":
            self.added = args[0]
            if self.ends:
                raise _Added
            return torch.zeros_like(self.added, dtype=options.get("dtype"))
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

    def _values(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return the values weighted by attention, in the layout of the call."""
        assert self.q is not None
        assert self.k is not None
        assert self.added is not None
        assert self.tap.scale is not None
        added = self._by_head(self.added)
        visible = added > MASKED
        bias = added.masked_fill(~visible, 0)
        of_keys = bias[:, :, -1:]  # ALiBi is a number for each key, which masked cells have too
        if torch.equal(bias, of_keys.masked_fill(~visible, 0)):
            bias = of_keys.expand_as(bias)
        attention = Attention(
            q=self._by_head(self.q).transpose(1, 2),
            k=self._by_head(self.k).transpose(1, 2),
            v=self._by_head(v).transpose(1, 2),
            mask=Mask.of(visible[:, :1]),
            scale=self.tap.scale,
            bias=bias if bool(bias.any()) else None,
            angles=self.tap.angles,
        )
        z = self.tap(attention).transpose(1, 2).to(v.dtype)
        return z.flatten(0, 1) if weights.ndim == 3 else z.contiguous()

    def _by_head(self, tensor: Tensor) -> Float[Tensor, "batch head row col"]:
        return tensor.unflatten(0, (-1, self.n_heads)) if tensor.ndim == 3 else tensor


def attend_inline(
    tap: Tap,
    n_heads: int,
    attend: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module's own forward pass of attention through the tap."""
    if tap.scale is None:
        caches = dict.fromkeys({"layer_past", "past_key_values"} & {*kwargs})
        without, with_ones = (
            _added(InlineAttention(tap, n_heads, product, ends=True), attend, args, kwargs | caches)
            for product in (0.0, 1.0)
        )
        cell = without.abs().argmin()  # where nothing is added
        tap.scale = float((with_ones - without).flatten()[cell])
    with InlineAttention(tap, n_heads):
        return attend(*args, **kwargs)


def _added(
    mode: InlineAttention, attend: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return what a forward pass takes the softmax of."""
    try:
        with mode:
            attend(*args, **kwargs)
    except _Added:
        pass
    assert mode.added is not None
    return mode.added.double()
