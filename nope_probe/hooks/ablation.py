"""Remove the mask, RoPE, a projection, the MLP or learned positions from some blocks of a model.

Removing a projection means: the same model with that weight set to `c * P`, where row r of P reads
coordinate r % d_model (for W_O: its transpose), one key and value head per query head, no bias;
q/k-norm, RoPE and scale stay. The model's parameters are never touched: every removal is written
through hook points, and equals the model edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args
from weakref import WeakSet

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.components import _has, components, position_point
from nope_probe.hooks.forward import Installation, hooks_attached
from nope_probe.hooks.gains import Gains, norm_gain, project_identity, project_identity_transposed
from nope_probe.hooks.layer import BridgeLayer, Layer, layers_of, repeat_heads
from nope_probe.hooks.names import COMPONENTS, WEIGHTS, Component, Gain, Projection
from nope_probe.hooks.qk_reader import QKReader

_ABLATED: WeakSet[Any] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What to remove, and where.

    Attributes:
        remove: components.
        layers: block numbers from 0; None for all.
        gain: the size of a replaced projection. `output`: the RMS of its output over the run's
            tokens in the intact model (needs `calibrate`); `norm`: its Frobenius norm over the
            root of its rows; `identity`: 1.

    Raises:
        ValueError: for a component or gain that does not exist.

    Example:
        >>> from nope_probe import Ablation
        >>> Ablation(remove=["mask", "w_q"], layers=[0, 1], gain="norm").remove
        ['mask', 'w_q']
    """

    remove: Sequence[Component] = ()
    layers: Sequence[int] | None = None
    gain: Gain = "output"

    def __post_init__(self) -> None:
        unknown = [name for name in self.remove if name not in COMPONENTS]
        if unknown:
            raise ValueError(f"unknown component {unknown[0]!r}; there are {', '.join(COMPONENTS)}")
        if self.gain not in get_args(Gain):
            raise ValueError(f"unknown gain {self.gain!r}; there are {', '.join(get_args(Gain))}")


@contextmanager
def ablated(model: Any, spec: Ablation, gains: Gains | None = None) -> Iterator[Any]:
    """Run a model without some of its components for as long as the context lasts.

    Args:
        model: a HookedTransformer or TransformerBridge; its outputs are bit-identical afterwards.
        spec: what to remove, and where.
        gains: what `calibrate` measured; needed for the gain `output` when a weight is removed.

    Raises:
        ValueError: if the model lacks a component, or gains are needed and not given.
        RuntimeError: inside another `ablated` on this model: two writers of the attention scores
            do not commute. Name all components in one Ablation.

    Example:
        >>> from nope_probe import Ablation, ablated, load
        >>> model = load("nope-tiny").model
        >>> with ablated(model, Ablation(remove=["mask", "w_k"], gain="norm")):
        ...     logits = model(torch.tensor([[0, 5, 9]]))
    """
    blocks = layers_of(model)
    chosen = range(len(blocks)) if spec.layers is None else spec.layers
    if not set(chosen) <= set(range(len(blocks))):
        raise ValueError(f"expected layers from 0 to {len(blocks) - 1}, got {list(chosen)}")
    lacking = [name for name in spec.remove if not _has(model, name)]
    if lacking:
        has = ", ".join(components(model))
        raise ValueError(f"the model has no {lacking[0]} to remove; it has {has}")
    if model in _ABLATED:
        raise RuntimeError("the model is ablated already: name all components in one Ablation")
    hooks = [
        pair for index in chosen for pair in _BlockAblation(blocks[index], spec, gains).hooks()
    ]
    if "pos_embed" in spec.remove:
        hooks.append((position_point(model), _flatten_positions))
    _ABLATED.add(model)
    try:
        with hooks_attached(hooks):
            yield model
    finally:
        _ABLATED.discard(model)


def _flatten_positions(
    tensor: Float[Tensor, "batch pos d_model"], hook: object
) -> Float[Tensor, "batch pos d_model"]:
    return tensor.mean(-2, keepdim=True).expand_as(tensor).clone()


class _BlockAblation:
    """The removals in one block: what they must see, and what they write."""

    def __init__(self, layer: Layer, spec: Ablation, gains: Gains | None) -> None:
        self.layer, self.remove, self.reader = layer, set(spec.remove), QKReader(layer)
        removed = [name for name in WEIGHTS if name in self.remove]
        self.gain = {name: _gain(layer, name, spec.gain, gains) for name in removed}
        self.seen: dict[str, Tensor] = {}

    def hooks(self) -> Iterator[Installation]:
        """Give the hooks in the order in which they must be installed."""
        point, remove = self.layer.point, self.remove
        if remove & {"w_q", "w_k", "w_v"}:
            yield point(self.layer.input_point), self.see_input
        if "w_q" in remove:
            yield point("attn.hook_q"), self.write_q
        if "rope" in remove:
            yield from self._rope_hooks()
        if remove & {"mask", "w_k"}:
            yield from self.reader.hooks()
            yield point("attn.hook_attn_scores"), self.write_scores
        if "w_v" in remove:
            yield point("attn.hook_pattern"), self.see_pattern
            yield point("attn.hook_z"), self.write_z
        if "w_o" in remove:
            yield point("attn.hook_z"), self.see_z
            yield point(self.layer.write_attn_out), self.write_attn_out
        if "mlp" in remove:
            yield point("hook_mlp_out"), _zero
        yield point("hook_resid_post"), self.reset

    def _rope_hooks(self) -> Iterator[Installation]:
        if isinstance(self.layer, BridgeLayer):
            if self.layer.has("attn.hook_cos"):
                yield self.layer.point("attn.hook_cos"), _one
                yield self.layer.point("attn.hook_sin"), _zero
            return
        yield from self.reader.hooks()
        yield self.layer.point("attn.hook_rot_q"), self.write_unrotated_q
        yield self.layer.point("attn.hook_rot_k"), self.write_unrotated_k

    def _heads(self, name: Projection) -> Float[Tensor, "batch pos head d_head"]:
        return self.gain[name] * project_identity(
            self.seen["y"], self.layer.n_heads, self.layer.d_head
        )

    def see_input(self, tensor: Tensor, hook: object) -> None:
        self.seen["y"] = self.layer.attention_input(tensor)

    def see_pattern(self, tensor: Tensor, hook: object) -> None:
        self.seen["pattern"] = tensor

    def see_z(self, tensor: Tensor, hook: object) -> None:
        self.seen["z"] = tensor

    def write_q(self, tensor: Tensor, hook: object) -> Tensor:
        return self._heads("w_q").to(tensor.dtype)

    def write_unrotated_q(self, tensor: Tensor, hook: object) -> Tensor:
        return self.reader.unrotated("q")

    def write_unrotated_k(self, tensor: Tensor, hook: object) -> Tensor:
        return self.reader.unrotated("k")

    def write_scores(self, tensor: Tensor, hook: object) -> Tensor:
        """Rebuild the scores from q and k, masked as the model masked them unless the mask goes."""
        scores = self.layer.scores(self.reader.read("q"), self._keys()).to(tensor.dtype)
        if "mask" in self.remove:
            return scores
        # One sequence and head shows the mask of all: windows have equal length and no padding.
        masked = tensor[:1, :1] <= torch.finfo(tensor.dtype).min / 2
        return torch.where(masked, tensor, scores)

    def _keys(self) -> Float[Tensor, "batch pos head d_head"]:
        if "w_k" not in self.remove:
            return repeat_heads(self.reader.read("k"), self.layer.n_heads)
        keys = self.layer.norm(self._heads("w_k"), "k")
        unrotated = "rope" in self.remove and not isinstance(self.layer, BridgeLayer)
        return keys if unrotated else self.reader.finish(keys)

    def write_z(self, tensor: Tensor, hook: object) -> Tensor:
        pattern = self.seen.pop("pattern")  # the largest tensor of a block: not kept for the next
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, self._heads("w_v").to(pattern.dtype))
        return z.to(tensor.dtype)

    def write_attn_out(self, tensor: Tensor, hook: object) -> Tensor:
        z = rearrange(self.seen["z"], "batch pos head d_head -> batch pos (head d_head)")
        return (self.gain["w_o"] * project_identity_transposed(z, self.layer.d_model)).to(
            tensor.dtype
        )

    def reset(self, tensor: Tensor, hook: object) -> None:
        """Let go of what was read of a pass: all blocks' queries and keys are gigabytes."""
        self.seen.clear()
        self.reader.seen.clear()


def _gain(layer: Layer, name: Projection, gain: Gain, gains: Gains | None) -> float:
    if gain == "identity":
        return 1.0
    if gain == "norm":
        return norm_gain(layer, name)
    if gains is None:
        raise ValueError(
            f"the gain 'output' of {name} is measured: pass gains=calibrate(model, tokens), "
            "or choose gain='norm' or 'identity'"
        )
    return gains.of(name, layer.index)


def _one(tensor: Tensor, hook: object) -> Tensor:
    return torch.ones_like(tensor)


def _zero(tensor: Tensor, hook: object) -> Tensor:
    return torch.zeros_like(tensor)
