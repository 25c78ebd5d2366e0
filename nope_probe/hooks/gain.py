"""The size c of a removed projection's stand-in c * P, and P itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.layer import Layer, layers_of
from nope_probe.hooks.stream import Keeper, Meter, Part, stream
from nope_probe.hooks.tap import Installation

Gain = Literal["output", "norm", "identity"]
Projection = Literal["w_q", "w_k", "w_o", "w_v"]


@dataclass(frozen=True, kw_only=True)
class Gains:
    """What `calibrate` measured: per projection, one c per block.

    With it the stand-in's output has the RMS that the weight's output has over the run's tokens.
    """

    c: dict[Projection, tuple[float, ...]]

    def of(self, name: Projection, layer: int) -> float:
        """Give c of one projection in one block (from 0)."""
        return self.c[name][layer]


def heads(
    y: Float[Tensor, "batch pos d_model"], n_heads: int, d_head: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Apply P: row r of all heads' rows reads coordinate r % d_model."""
    rows = torch.arange(n_heads * d_head, device=y.device) % y.shape[-1]
    return rearrange(y[..., rows], "batch pos (head d_head) -> batch pos head d_head", head=n_heads)


def unheads(
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
    on_batch: Callable[[int], object] | None = None,
    keeper: Keeper | None = None,
) -> Gains:
    """Measure the gains `output` in one pass of the intact model over the run's tokens."""
    meters = [_GainMeter(layer) for layer in layers_of(model)]
    stream(
        model,
        inputs,
        meters,
        end=(len(meters) - 1, "hook_resid_post"),
        batch_size=batch_size,
        keeper=keeper,
        on_batch=on_batch,
    )
    names: tuple[Projection, ...] = ("w_q", "w_k", "w_o", "w_v")
    return Gains(c={name: tuple(meter.gain(name) for meter in meters) for name in names})


class _GainMeter(Meter):
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

    def forget(self) -> None:
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
        self.see("heads(y)", heads(y, self.layer.n_heads, self.layer.d_head))

    def see_z(self, tensor: Tensor, hook: object) -> None:
        z = rearrange(tensor, "batch pos head d_head -> batch pos (head d_head)")
        self.see("unheads(z)", unheads(z, self.layer.d_model))

    def see_attn_out(self, tensor: Tensor, hook: object) -> None:
        self.see("w_o", tensor)
        if not self.sits_out:
            self.add(**self.seen)
        self.forget()

    def _rms(self, key: str) -> float:
        square, size = self.totals[key][0].tolist()
        return (square / size) ** 0.5

    def gain(self, name: Projection) -> float:
        return self._rms(name) / self._rms("unheads(z)" if name == "w_o" else "heads(y)")
