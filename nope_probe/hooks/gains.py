"""The gain c of a removed projection's replacement c * P, and P, the rectangular identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from nope_probe.hooks.accumulators import Accumulator
from nope_probe.hooks.base_layer import Layer
from nope_probe.hooks.folds import Part
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs
from nope_probe.hooks.names import WEIGHTS, Projection
from nope_probe.hooks.protocols import Attachment, Hook, HookedModel, HookPoint
from nope_probe.hooks.streaming import StreamCheckpoint, stream


@dataclass(frozen=True, kw_only=True)
class Gains:
    """The gains `output` that `calibrate` measured.

    Attributes:
        c: per projection, the gain of each block. With it the output of the replacement has the RMS
            that the weight's output has over the run's tokens.
    """

    c: dict[Projection, tuple[float, ...]]

    def of(self, name: Projection, layer: int) -> float:
        """Return the gain of one projection in one block (from 0)."""
        return self.c[name][layer]


def project_identity(
    y: Float[Tensor, "batch pos d_model"], n_heads: int, d_head: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Apply P, whose row r reads coordinate r % d_model; rows are those of all heads."""
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
    """Return the gain `norm`, ||W||_F / sqrt(rows), rows counted on the side of the heads."""
    weight = layer.weight(name).detach()
    n_heads = layer.n_kv_heads if name in ("w_k", "w_v") else layer.n_heads
    return float(weight.float().norm() / (n_heads * layer.d_head) ** 0.5)


def calibrate(
    model: HookedModel,
    inputs: Inputs,
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
        >>> from nope_probe import Ablation, ablated, load
        >>> from nope_probe.hooks.gains import calibrate
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
        end=accumulators[-1].layer.point("hook_resid_post"),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    return Gains(c={name: tuple(each.gain(name) for each in accumulators) for name in WEIGHTS})


class _GainAccumulator(Accumulator):
    """Sums the squares of one block's projections' outputs, and of P applied to their inputs."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(n_folds=1)
        self.layer = layer
        self.squares: dict[str, list[Part]] = {}

    def hooks(self) -> Iterator[Attachment]:
        layer = self.layer
        yield layer.point(layer.norm_point("ln1")), self.read_input
        for name in ("q", "k", "v"):
            yield layer.point(f"attn.hook_{name}"), self._reader(f"w_{name}")
        yield layer.point("attn.hook_z"), self.read_z
        yield layer.point(layer.attn_out_point), self.update

    def reset(self) -> None:
        self.squares.clear()

    def _reader(self, key: str) -> Hook:
        def read(tensor: Tensor, hook: HookPoint) -> None:
            self._square(key, tensor)

        return read

    def read_input(self, tensor: Tensor, hook: HookPoint) -> None:
        y = self.layer.norm_output("ln1", tensor)
        self._square("identity(y)", project_identity(y, self.layer.n_heads, self.layer.d_head))

    def read_z(self, tensor: Tensor, hook: HookPoint) -> None:
        z = rearrange(tensor, "batch pos head d_head -> batch pos (head d_head)")
        self._square("identity(z)", project_identity_transposed(z, self.layer.d_model))

    def update(self, tensor: Tensor, hook: HookPoint) -> None:
        """Add the squares of this pass, the output of W_O being the last."""
        self._square("w_o", tensor)
        if not self.already_counted:
            self.add(**self.squares)
        self.reset()

    def _square(self, key: str, tensor: Tensor) -> None:
        square = tensor.double().square().sum()
        self.squares[key] = [(0, torch.stack((square, torch.full_like(square, tensor.numel()))))]

    def _rms(self, key: str) -> float:
        square, size = self.totals[key][0].tolist()
        return (square / size) ** 0.5

    def gain(self, name: Projection) -> float:
        """Return c = RMS of the projection's output / RMS of P applied to its input."""
        return self._rms(name) / self._rms("identity(z)" if name == "w_o" else "identity(y)")
