"""The size c of a removed projection's stand-in c * P, and P itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.accumulators import Accumulator
from nope_probe.hooks.folds import Part
from nope_probe.hooks.forward import Installation
from nope_probe.hooks.layer import Layer, layers_of
from nope_probe.hooks.names import Projection
from nope_probe.hooks.streaming import StreamCheckpoint, stream


@dataclass(frozen=True, kw_only=True)
class Gains:
    """What `calibrate` measured: per projection, one c per block.

    With it the stand-in's output has the RMS that the weight's output has over the run's tokens.
    """

    c: dict[Projection, tuple[float, ...]]

    def of(self, name: Projection, layer: int) -> float:
        """Give c of one projection in one block (from 0)."""
        return self.c[name][layer]


def project_identity(
    y: Float[Tensor, "batch pos d_model"], n_heads: int, d_head: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Apply P: row r of all heads' rows reads coordinate r % d_model."""
    rows = torch.arange(n_heads * d_head, device=y.device) % y.shape[-1]
    return rearrange(y[..., rows], "batch pos (head d_head) -> batch pos head d_head", head=n_heads)


def project_identity_transposed(
    z: Float[Tensor, "batch pos width"], d_model: int
) -> Float[Tensor, "batch pos d_model"]:
    """Apply P transposed: coordinate m sums the rows r with r % d_model == m."""
    out = torch.zeros(*z.shape[:-1], d_model, dtype=z.dtype, device=z.device)
    rows = torch.arange(z.shape[-1], device=z.device) % d_model
    return out.index_add_(-1, rows, z)


def norm_gain(layer: Layer, name: Projection) -> float:
    """Give ||W||_F / sqrt(rows), rows counted on the side of the heads."""
    weight = layer.weight(name).detach()
    n_heads = layer.n_kv_heads if name in ("w_k", "w_v") else layer.n_heads
    return float(weight.float().norm() / (n_heads * layer.d_head) ** 0.5)


def calibrate(
    model: Any,
    inputs: Tensor,
    *,
    batch_size: int = 32,
    checkpoint: StreamCheckpoint | None = None,
) -> Gains:
    """Measure the gains `output` of all projections in one pass of the intact model.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: the tokens of the run (or vectors), on which outputs are to have the same RMS.
        batch_size: sequences per forward pass.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Example:
        >>> from nope_probe import Ablation, ablated, calibrate, load
        >>> model, tokens = load("nope-tiny").model, torch.tensor([[0, 5, 9], [0, 7, 2]])
        >>> gains = calibrate(model, tokens)
        >>> with ablated(model, Ablation(remove=["w_q"]), gains):
        ...     logits = model(tokens)
    """
    accumulators = [_GainAccumulator(layer) for layer in layers_of(model)]
    stream(
        model,
        inputs,
        accumulators,
        fold_of=torch.zeros(len(inputs), dtype=torch.long),
        end=(len(accumulators) - 1, "hook_resid_post"),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    names: tuple[Projection, ...] = ("w_q", "w_k", "w_o", "w_v")
    return Gains(
        c={name: tuple(accumulator.gain(name) for accumulator in accumulators) for name in names}
    )


class _GainAccumulator(Accumulator):
    """Sums the squares of one block's projections' outputs, and of what P makes of their inputs."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(n_folds=1)
        self.layer = layer
        self.seen: dict[str, list[Part]] = {}

    def hooks(self) -> Iterator[Installation]:
        """Give the hooks that measure, the last of which adds."""
        layer = self.layer
        yield layer.point(layer.input_point), self.see_input
        for name in ("q", "k", "v"):
            yield layer.point(f"attn.hook_{name}"), self._measure(f"w_{name}")
        yield layer.point("attn.hook_z"), self.see_z
        yield layer.point(layer.write_attn_out), self.see_attn_out

    def reset(self) -> None:
        self.seen.clear()

    def see(self, key: str, tensor: Tensor) -> None:
        square = tensor.double().square().sum()
        self.seen[key] = [(0, torch.stack((square, torch.full_like(square, tensor.numel()))))]

    def _measure(self, key: str) -> Callable[..., None]:
        def measure(tensor: Tensor, hook: object) -> None:
            self.see(key, tensor)

        return measure

    def see_input(self, tensor: Tensor, hook: object) -> None:
        y = self.layer.attention_input(tensor)
        self.see("identity(y)", project_identity(y, self.layer.n_heads, self.layer.d_head))

    def see_z(self, tensor: Tensor, hook: object) -> None:
        z = rearrange(tensor, "batch pos head d_head -> batch pos (head d_head)")
        self.see("identity(z)", project_identity_transposed(z, self.layer.d_model))

    def see_attn_out(self, tensor: Tensor, hook: object) -> None:
        self.see("w_o", tensor)
        if not self.already_counted:
            self.add(**self.seen)
        self.reset()

    def _rms(self, key: str) -> float:
        square, size = self.totals[key][0].tolist()
        return (square / size) ** 0.5

    def gain(self, name: Projection) -> float:
        return self._rms(name) / self._rms("identity(z)" if name == "w_o" else "identity(y)")
