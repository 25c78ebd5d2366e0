"""The linear maps of a block when the scales of its norms are kept fixed for every token.

A norm of a token x is s C(x) w + b: C takes the mean away (LayerNorm) or does nothing (RMS norm),
w and b are learned, and s is the token's scale. With s kept, queries and keys are linear in the
residual stream, and so exactly the sum of the components' contributions. Maps are found by
running a block's modules on chosen vectors, so no family of models is known here by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from nope_probe.hooks.layers.attention import (
    Attention,
    relative_error,
    sum_query_groups,
    upcast,
)
from nope_probe.hooks.layers.base_layer import Layer, Vectors
from nope_probe.hooks.layers.hook_points import (
    HookedModel,
    hooks_detached,
    methods_replaced,
)
from nope_probe.hooks.layers.model import tapped
from nope_probe.hooks.layers.passes import run_forward, traits_of
from nope_probe.hooks.layers.tap import Edits, RemovedPairs, edited, taps_read
from nope_probe.removal import Component

_LARGE = 1e3  # size of the vectors that show a norm's map: its epsilon is nothing next to them
_N_POS = 16  # length of the sequences in which vectors go through a block's projections


@dataclass(frozen=True, kw_only=True, eq=False)
class NormMap:
    """A norm, s C(x) w + b, without the scale s of each token.

    Attributes:
        weight, bias: w and b; None where there is no norm, which leaves tokens as they are.
        centred: whether C takes a token's mean away.
    """

    weight: Float[Tensor, "*width"] | None = None
    bias: Float[Tensor, "*width"] | None = None
    centred: bool = False

    def linear(self, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens width"]:
        """Return C(x) w."""
        if self.weight is None:
            return x
        return (x - x.mean(-1, keepdim=True) if self.centred else x) * self.weight.to(x)

    def scales(self, x: Vectors, y: Vectors) -> Float[Tensor, "batch pos"]:
        """Return the scale s of each token x whose output is y."""
        if self.weight is None or self.bias is None:
            return x.new_ones(x.shape[:-1])
        direction = self.linear(x)
        size = direction.square().sum(-1).clamp_min(torch.finfo(x.dtype).tiny)
        return ((y - self.bias.to(y)) * direction).sum(-1) / size

    def outputs(self, x: Vectors, scales: Float[Tensor, "batch pos"]) -> Vectors:
        """Return s C(x) w + b."""
        if self.bias is None:
            return x
        return self.linear(x) * scales[..., None] + self.bias.to(x)


def norm_map(norm: Callable[[Tensor], Tensor], like: Float[Tensor, "*shape width"]) -> NormMap:
    """Return the map of a norm, from its outputs for three vectors.

    Args:
        norm: takes vectors to normed vectors.
        like: vectors of the norm's input shape.
    """
    bias = upcast(norm(torch.zeros_like(like)))
    ones = torch.full_like(like, _LARGE)
    centred = bool((upcast(norm(ones)) - bias).abs().max() < 1e-3)
    signs = ones.clone()
    signs[..., 1::2] = -_LARGE
    normed, signs = upcast(norm(signs)), upcast(signs)
    direction = signs - signs.mean(-1, keepdim=True) if centred else signs
    size = direction.square().mean(-1, keepdim=True).sqrt()
    return NormMap(weight=(normed - bias) * size / direction, bias=bias, centred=centred)


def norm_between(block: nn.Module, x: Vectors, y: Vectors, tolerance: float) -> NormMap | None:
    """Return the map that takes x to y: the identity, or a norm of the block; None if neither does.

    Args:
        block: the block.
        x: tokens before the norm.
        y: the same tokens after the norm.
        tolerance: the relative error up to which outputs count as equal.
    """
    if relative_error(y, x) <= tolerance:
        return NormMap()
    original: Any = getattr(block, "original_component", None)
    for norm in [*block.children(), *([] if original is None else original.children())]:
        if is_norm(norm):
            like = x[0, 0].to(next(norm.parameters(), x).dtype)
            candidate = norm_map(partial(_of_token, norm), like)
            if relative_error(candidate.outputs(x, candidate.scales(x, y)), y) <= tolerance:
                return candidate
    return None


def _of_token(norm: nn.Module, token: Float[Tensor, " width"]) -> Float[Tensor, " width"]:
    return norm(token[None, None])[0, 0]


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by the name of its class."""
    wrapped = getattr(module, "original_component", None)
    return any("norm" in type(candidate).__name__.lower() for candidate in (module, wrapped))


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectionMap:
    """The map from a block's normed input y to its queries and keys before RoPE.

    With the scale t of an inner norm (q/k-norm, the norms of MLA) they are t (y W + b) + c; t is 1
    where there is no such norm. Query heads come first, then key heads.

    Attributes:
        weight: W.
        bias, constant: b and c.
        n_heads: how many of the heads are query heads.
        parts: the coordinates of a head that share a scale; none without an inner norm.
    """

    weight: Float[Tensor, "d_model head d_head"]
    bias: Float[Tensor, "head d_head"]
    constant: Float[Tensor, "head d_head"]
    n_heads: int
    parts: tuple[slice | Tensor, ...] = ()

    @property
    def n_kv_heads(self) -> int:
        """How many of the heads are key heads."""
        return self.weight.shape[1] - self.n_heads

    def with_grouped_queries(self, n_kv_heads: int) -> ProjectionMap:
        """Return the map to the sums of the queries that share a key head, and to keys.

        Where scales differ between heads there is no such map, and the map itself comes back.
        """
        if self.parts:
            return self

        def grouped(x: Float[Tensor, "*d_model head d_head"]) -> Tensor:
            q, k = x[..., : self.n_heads, :], x[..., self.n_heads :, :]
            return torch.cat((sum_query_groups(q, n_kv_heads), k), -2)

        weight, bias, constant = map(grouped, (self.weight, self.bias, self.constant))
        return ProjectionMap(weight=weight, bias=bias, constant=constant, n_heads=n_kv_heads)

    def gains(
        self, y: Vectors, heads: Float[Tensor, "batch pos head d_head"], tolerance: float
    ) -> Float[Tensor, "batch pos head part"]:
        """Return t of each token, head and part of it, from y and its queries and keys.

        Raises:
            NotImplementedError: if the map gives queries and keys with a larger relative error
                than the tolerance.
        """
        plain = torch.einsum("bpm,mhd->bphd", y, self.weight.to(y)) + self.bias.to(y)
        target = heads - self.constant.to(heads)
        gains = torch.ones(*heads.shape[:3], max(1, len(self.parts)), dtype=y.dtype).to(y)
        for index, part in enumerate(self.parts):
            direction = plain[..., part]
            size = direction.square().sum(-1).clamp_min(torch.finfo(y.dtype).tiny)
            gains[..., index] = (target[..., part] * direction).sum(-1) / size
        error = relative_error(plain * self.spread(gains), target)
        if not error <= tolerance:
            raise NotImplementedError(
                "queries and keys are no linear map of the normed residual stream, even with the "
                f"scales of norms kept (relative error {error:.1e})"
            )
        return gains

    def spread(
        self, gains: Float[Tensor, "*tokens head part"]
    ) -> Float[Tensor, "*tokens head d_head"]:
        """Return the gain of each coordinate."""
        if not self.parts:
            return gains.expand(*gains.shape[:-1], self.weight.shape[-1])
        spread = gains.new_empty(*gains.shape[:-1], self.weight.shape[-1])
        for index, part in enumerate(self.parts):
            spread[..., part] = gains[..., [index]]
        return spread


def projection_map(model: HookedModel, layer: Layer) -> ProjectionMap:
    """Return the map to a block's queries and keys, from a pass whose inputs are a basis.

    Raises:
        NotImplementedError: for a block whose keys are made of another block's input.
    """
    if layer.source_of_keys is not None:
        raise NotImplementedError(
            f"L{layer.index} attends to the keys of L{layer.source_of_keys}, which are no map of "
            f"the residual stream that it reads: --layers {layer.index} takes the layers before it"
        )
    basis = torch.cat((torch.zeros(1, layer.d_model), torch.eye(layer.d_model)))
    n_pos = min(_N_POS, getattr(layer.cfg, "n_ctx", None) or _N_POS)
    n_seqs = -(-len(basis) // n_pos)
    inputs = torch.zeros(n_seqs * n_pos, layer.d_model)
    inputs[: len(basis)] = basis
    inputs = inputs.view(n_seqs, n_pos, -1)
    with tapped(model):
        with _norms_as(layer, 1.0) as norms:
            at_one = _heads_of(model, layer, inputs)[: len(basis)]
        with _norms_as(layer, 0.0):
            constant = _heads_of(model, layer, inputs[:1])[0]
    constant = constant if norms else torch.zeros_like(constant)
    rotary = traits_of(model)[layer.index].rotary
    parts: tuple[slice | Tensor, ...] = (slice(None),) if norms else ()
    if norms and rotary is not None and rotary.pairs is not None:
        turned = torch.zeros(at_one.shape[-1], dtype=torch.bool)
        turned[rotary.pairs.flatten()] = True
        if not turned.all():  # in MLA, the rotated part of a key has no norm
            parts = (turned.nonzero().flatten(), (~turned).nonzero().flatten())
    return ProjectionMap(
        weight=at_one[1:] - at_one[0],
        bias=at_one[0] - constant,
        constant=constant,
        n_heads=layer.n_heads,
        parts=parts,
    )


def _heads_of(
    model: HookedModel, layer: Layer, inputs: Vectors
) -> Float[Tensor, "token head d_head"]:
    """Return the queries and keys that a block makes of normed inputs, as at position 0."""
    read: list[Tensor] = []

    def keep(attention: Attention) -> None:
        read.append(torch.cat((attention.q, attention.k), 2).double().cpu())

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def replaced(value: object) -> object:
            is_input = isinstance(value, Tensor) and value.shape == inputs.shape
            return inputs.to(value) if isinstance(value, Tensor) and is_input else value

        new = {name: replaced(value) for name, value in kwargs.items()}
        return tuple(replaced(value) for value in args), new

    rotary, tap = traits_of(model)[layer.index].rotary, layer.tap
    tokens = torch.full(inputs.shape[:2], min(1, model.cfg.d_vocab - 1))
    straight = None if rotary is None else RemovedPairs(bands=(Component("rope"),), rotary=rotary)
    with (
        torch.inference_mode(),
        hooks_detached(model),
        layer.attn.register_forward_pre_hook(enter, with_kwargs=True),
        edited({tap: Edits(rope=straight)}),
        taps_read([(tap, keep)], [tap]),
    ):
        run_forward(model, tokens)
    return rearrange(read[0], "seq pos head d_head -> (seq pos) head d_head")


@contextmanager
def _norms_as(layer: Layer, scale: float) -> Iterator[list[nn.Module]]:
    """Let the norms inside a block's attention have one scale for all tokens; yield these norms."""
    norms = list(_outermost_norms(layer.attending))
    with ExitStack() as stack:
        for norm in norms:
            forward = _with_scale(scale, norm.forward)
            stack.enter_context(methods_replaced(norm, forward=forward))
        yield norms


def _outermost_norms(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the norms in a module, but no norm inside another norm."""
    for child in module.children():
        if is_norm(child):
            yield child
        else:
            yield from _outermost_norms(child)


def _with_scale(scale: float, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        fitted = norm_map(lambda vectors: forward(vectors, *args, **kwargs), x[:1])
        assert fitted.bias is not None
        return (fitted.linear(x) * scale + fitted.bias.to(x)).to(x.dtype)

    return run
