"""The tap: computes a block's attention from q and k as they are multiplied.

transformers looks up its attention function by name. A bridge of any family whose configuration
holds our name hands q, k, v, mask, scale, soft cap and sinks over to `attention_forward`. A
HookedTransformer's block calls its tap itself. `Edits` change a block's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import pi
from threading import local
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import (
    Attention,
    AttentionMask,
    HeadVectors,
    query_blocks,
    repeat_heads,
    unmasked,
)
from nope_probe.hooks.layers.hook_points import HookPoint
from nope_probe.maps.positions import Angles, Rotation, cos_and_sin
from nope_probe.removal import Component

# Our functions' names among transformers', in models whose masks are added to scores (eager
# attention) and in models that leave causal masks out (all other).
NAME, FUSED = "nope_probe", "nope_probe_fused"


class StopForward(Exception):  # noqa: N818  (it ends a forward pass early, it is no error)
    """Raised by a hook that has read the last wanted tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RemovedPairs:
    """The rotary pairs of one block that are removed: rotated as at position 0.

    Attributes:
        bands: bands of RoPE, or `rope`.
        rotary: the block's rotation.

    Raises:
        UserError: for a band of pairs that do not exist.
    """

    bands: Collection[Component]
    rotary: Rotation

    def __post_init__(self) -> None:
        n = len(self.rotary.frequencies)
        for name in self.bands:
            begin, end = name.pairs or (0, n)
            if name.is_band and not 0 <= begin < end <= n:
                raise UserError(f"no band {name}: the model rotates {n} pairs, rope[0:{n}]")

    def mask(self, n_pos: int) -> Bool[Tensor, " pair"]:
        """Return a mask of the removed pairs, for sequences of n_pos tokens."""
        removed = torch.zeros(len(self.rotary.frequencies), dtype=torch.bool)
        is_high = 2 * pi / self.rotary.frequencies < n_pos
        for name in self.bands:
            begin, end = name.pairs or (0, len(removed))
            every = {"rope_high": is_high, "rope_low": ~is_high}.get(name, torch.ones_like(is_high))
            removed[begin:end] |= every[begin:end]
        return removed

    def _mask_at(self, angles: Angles) -> Bool[Tensor, " pair"]:
        """Return a mask of the removed pairs, by the frequencies and the length of a pass."""
        n_pos = cos_and_sin(angles)[0].shape[-2]
        of_length = n_pos > 1 and any(name.of_length for name in self.bands)
        return (replace(self, rotary=self.rotary.at(angles)) if of_length else self).mask(n_pos)

    def straightened(self, angles: Angles) -> Angles:
        """Return a model's angles, with the angles of position 0 in the removed pairs."""
        if isinstance(angles, Tensor) and not angles.is_complex():
            return torch.zeros_like(angles)
        assert self.rotary.columns is not None
        cos, sin = cos_and_sin(angles)
        removed = self._mask_at(angles)[self.rotary.columns].to(cos.device)
        straight = cos.masked_fill(removed, self.rotary.factor), sin.masked_fill(removed, 0.0)
        return torch.complex(*straight) if isinstance(angles, Tensor) else straight

    def turned_back(self, x: HeadVectors, angles: Angles) -> HeadVectors:
        """Return rotated queries or keys, with the removed pairs as at position 0.

        Raises:
            NotImplementedError: if the pairs' coordinates are not known.
        """
        return self.rotary.at(angles).of(self._mask_at(angles)).turned_back(x)


class Edits(NamedTuple):
    """Changes of a block's attention.

    Attributes:
        rope: the rotary pairs that stay as at position 0; None for no pairs.
        change: the change of attention before it is computed; None for none.
    """

    rope: RemovedPairs | None = None
    change: Callable[[Attention], Attention] | None = None


class PassState(local):
    """The readers of one thread, and what its forward pass leaves for masks and taps.

    Attributes:
        angles: the angles of RoPE in the block that attends.
        far_apart: whether masks are made as if neighbours were beyond any window or chunk.
        readers: called with the attention of each pass, after all hooks, by tap.
        weights: the attention weights of the blocks of a pass that returns them; None in others.
    """

    angles: Angles | None = None
    far_apart = False
    weights: list[Float[Tensor, "batch head query_pos key_pos"]] | None = None

    def __init__(self) -> None:
        self.readers: dict[Tap, list[Callable[[Attention], None]]] = {}


current = PassState()


class Tap:
    """Computes one block's attention, fires its hook points, and shows it to readers.

    Attributes:
        masked: the value of masked scores: -inf on HookedTransformers, finfo.min on bridges.
        edits: the edits in effect.
        scale: the factor between q.k and a score, of families that compute attention in line.
    """

    def __init__(self, scores: HookPoint, pattern: HookPoint, masked: float | None = None) -> None:
        self.scores_point, self.pattern_point, self.masked = scores, pattern, masked
        self.edits = Edits()
        self.scale: float | None = None

    def __call__(
        self,
        attention: Attention,
        dropout: float | Float[Tensor, "batch head query_pos key_pos"] = 0.0,
    ) -> Float[Tensor, "batch pos head d_value"]:
        """Return the values weighted by attention: fused, unless a hook needs the scores.

        Args:
            attention: the queries, keys and values.
            dropout: the share of the weights that training drops, or the weights' factors.

        Raises:
            StopForward: if the pass ends here.
        """
        change = self.edits.change
        if change is not None:
            attention = change(attention)
        if has_hooks(self.scores_point):
            scores = attention.masked_scores(masked=self.masked)
            attention = replace(attention, hooked=self.scores_point(scores))
        if has_hooks(self.pattern_point):
            pattern = self.pattern_point(attention.pattern(masked=self.masked))
            attention = replace(attention, hooked_pattern=pattern)
        for read in current.readers.get(self, ()):
            read(attention)
        if current.weights is not None:
            current.weights.append(attention.pattern(masked=self.masked))
        is_hooked = attention.hooked is not None or attention.hooked_pattern is not None
        is_fused = attention.soft_cap is attention.sinks is attention.fixed is None
        drops = isinstance(dropout, Tensor) or dropout > 0
        if not is_hooked and is_fused and not drops:
            return attention.weighted_values()
        v = repeat_heads(attention.v, attention.n_heads)
        cells = len(v) * attention.n_heads * attention.mask.n_keys
        # Hooks had the scores of all queries at once.
        at_once = is_hooked or drops
        values = []
        for rows in [slice(None)] if at_once else query_blocks(attention.mask.n_queries, cells):
            weights = attention.pattern(rows, self.masked).to(v.dtype)
            if isinstance(dropout, Tensor):
                weights = weights * dropout
            elif drops:
                weights = nn.functional.dropout(weights, dropout)
            values.append(torch.einsum("bhqk,bkhd->bqhd", weights, v))
        return values[0] if len(values) == 1 else torch.cat(values, 1)


@contextmanager
def edited(taps: dict[Tap, Edits]) -> Iterator[None]:
    """Compute attention with these edits, and no others, for as long as the context lasts."""
    before = {tap: tap.edits for tap in taps}
    for tap, edits in taps.items():
        tap.edits = edits
    try:
        yield
    finally:
        for tap, edits in before.items():
            tap.edits = edits


@contextmanager
def taps_read(
    readers: Iterable[tuple[Tap, Callable[[Attention], None]]], stopping: Collection[Tap] = ()
) -> Iterator[None]:
    """Show the attention of this thread's passes to readers, and end a pass at some taps."""

    def stop(attention: Attention) -> None:
        raise StopForward

    before = current.readers
    current.readers = {tap: [*of_tap] for tap, of_tap in before.items()}
    for tap, read in [*readers, *((tap, stop) for tap in stopping)]:
        current.readers.setdefault(tap, []).append(read)
    try:
        yield
    finally:
        current.readers = before


def has_hooks(point: HookPoint) -> bool:
    """Return whether a hook point has hooks."""
    module: Any = point
    return bool(module._forward_hooks or module._backward_hooks or module._forward_pre_hooks)


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "batch head query_pos d_head"],
    key: Float[Tensor, "batch kv_head key_pos d_head"],
    value: Float[Tensor, "batch value_head key_pos d_value"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    indices: Int[Tensor, "batch query_pos selected"] | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Float[Tensor, "batch query_pos head d_value"], None]:
    """Compute attention in place of transformers' functions, with their arguments.

    Raises:
        UserError: if queries attend to selected keys only, which differ between sequences.
    """
    if indices is not None and indices.shape[-1] < key.shape[2]:
        raise UserError(
            f"beyond {indices.shape[-1]} tokens this model attends to selected keys only: take "
            "shorter sequences"
        )
    tap: Tap = module.__dict__["tap"]
    mask, bias = _mask(module, query, key, attention_mask)
    attention = Attention(
        q=query.transpose(1, 2),
        k=key.transpose(1, 2),
        v=value.transpose(1, 2),
        mask=mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        soft_cap=softcap,
        bias=bias,
        sinks=s_aux,
        angles=current.angles,
    )
    return tap(attention, dropout), None


def _mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None
) -> tuple[AttentionMask, Float[Tensor, "one_or_batch one_or_head query_pos key_pos"] | None]:
    """Return the mask of visible keys, and the bias that a mask adds to their scores."""
    if isinstance(mask, HandedMask):
        if "cells" not in vars(mask):  # which no code has read or written
            return mask.mask, None
        mask = mask.cells
    n_queries, n_keys = query.shape[2], key.shape[2]
    if mask is None:
        config: Any = module.config
        is_fused = config._attn_implementation == FUSED
        causal = is_fused and n_queries > 1 and getattr(module, "is_causal", True)
        make = AttentionMask.causal if causal else AttentionMask.full
        return make(n_queries, n_keys, query.device), None
    mask = mask[(None,) * (4 - mask.ndim)][..., :n_keys]
    mask = mask.expand(*mask.shape[:2], n_queries, n_keys)
    if mask.dtype == torch.bool:
        return AttentionMask.of(mask), None
    visible = unmasked(mask)
    bias = mask.masked_fill(~visible, 0)
    return AttentionMask.of(visible), bias if bool(bias.any()) else None


class HandedMask(Tensor):
    """The mask that transformers hands along: a tensor whose cells are made when code reads them.

    Attributes:
        mask: which keys are visible.
    """

    mask: AttentionMask

    @classmethod
    def of(cls, mask: AttentionMask, n_seqs: int, dtype: torch.dtype) -> HandedMask:
        """Return a mask of booleans, or of numbers that are added to scores."""
        cell = torch.empty(1, dtype=dtype, device=mask.device)
        handed = cell.expand(n_seqs, 1, mask.n_queries, mask.n_keys).as_subclass(cls)
        handed.mask = mask
        return handed

    @cached_property
    def cells(self) -> Tensor:
        """The cells, as transformers makes them, with what code has written into them."""
        visible = self.mask.rows().expand(self.shape).clone()
        if self.dtype == torch.bool:
            return visible
        lowest = torch.finfo(self.dtype).min
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, lowest)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _WITHOUT_CELLS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        args, options = tree_map_only(cls, lambda handed: handed.cells, (args, options))
        return func(*args, **options)


_WITHOUT_CELLS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.__len__, Tensor.is_floating_point),
}


def attention_mask(
    *, mask_function: Callable[..., Tensor], config: Any = None, **options: Any
) -> (
    Float[Tensor, "batch one query_pos key_pos"]
    | Bool[Tensor, "batch one query_pos key_pos"]
    | None
):
    """Return the mask of a pass, in place of transformers' mask functions.

    It is what transformers hands along to the same attention: numbers, or booleans, or None where
    fused attention knows that it is causal.
    """
    from transformers.masking_utils import eager_mask, prepare_padding_mask, sdpa_mask

    def at_a_distance(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask_function(batch, head, query << 40, key << 40)

    is_fused = getattr(config, "_attn_implementation", NAME) == FUSED
    allowed = at_a_distance if current.far_apart else mask_function
    if options.get("use_vmap") or hasattr(config, "index_topk"):
        # transformers' first function takes no indices; DeepSeek's selection of keys reads cells.
        whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        make = sdpa_mask if is_fused else eager_mask
        return make(mask_function=allowed, **options | whole)
    n_queries, n_keys = options["q_length"], options["kv_length"]
    q_offset, kv_offset = options.get("q_offset", 0), options.get("kv_offset", 0)
    local, device = options.get("local_size"), torch.device(options["device"])
    padding = prepare_padding_mask(options.get("attention_mask"), n_keys, kv_offset)
    if padding is not None:
        padding = padding.bool()[:, kv_offset : kv_offset + n_keys]
        padding = None if bool(padding.all()) else padding
    is_local = current.far_apart or (local is not None and n_keys >= local)
    dtype = torch.bool if is_fused else options.get("dtype", torch.float32)
    if options["allow_is_causal_skip"] and n_queries == n_keys and padding is None and not is_local:
        if is_fused:
            return None
        mask = AttentionMask.causal(n_queries, n_keys, device)
        return HandedMask.of(mask, options["batch_size"], dtype)
    batch = torch.arange(options["batch_size"], device=device)[:, None, None, None]
    head = torch.zeros_like(batch[:1])

    def sees(query: Tensor, key: Tensor) -> Tensor:
        cells = allowed(batch, head, query + q_offset, key + kv_offset)
        shape = torch.broadcast_shapes(query.shape, key.shape)
        cells = cells.expand(*(cells.shape[:-2] or (1, 1)), *shape)
        return cells if padding is None else cells & padding[batch, key]

    mask = AttentionMask(n_queries=n_queries, n_keys=n_keys, device=device, sees=sees)
    return HandedMask.of(mask, options["batch_size"], dtype)


@contextmanager
def positions_far_apart() -> Iterator[None]:
    """Make masks as if neighbours were at a distance of 2**40: beyond any window or chunk."""
    current.far_apart = True
    try:
        yield
    finally:
        current.far_apart = False


def register() -> None:
    """Make our functions known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (NAME, FUSED):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, attention_mask)
