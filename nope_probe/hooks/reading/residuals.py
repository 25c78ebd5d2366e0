"""Stream sequences through a model for a ridge regression on the residual stream after each block.

The regression needs only the sums X'X and X'y of the residuals, and its evaluation a prediction
per position. Therefore no more than a batch of residual streams is held.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.protocols import Attachment, HookedModel, HookPoint
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.streaming import StreamCheckpoint, stream

Targets = Float[Tensor, "seq pos target"]


def capture_moments(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    targets: Targets,
    *,
    n_layers: int | None = None,
    skip: int = 0,
    batch_size: int = 32,
    checkpoint: StreamCheckpoint | None = None,
) -> tuple[Float[Tensor, "layer row col"], Float[Tensor, "layer row target"]]:
    """Return X'X and X'y of the residual stream after each block, summed in float64 on the CPU.

    X is the residual stream with a last column of ones, so d_model + 1 columns; a row is a position
    of a sequence.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        tokens: sequences of equal length.
        targets: y, one or several numbers per position.
        n_layers: how many first blocks; all by default.
        skip: first positions to leave out.
        batch_size: sequences per forward pass.
        checkpoint: deals out batches to processes and saves sums; see `stream`.
    """
    blocks = layers_of(model)[:n_layers]
    sums = [MomentAccumulator(layer, targets, skip) for layer in blocks]
    _stream(model, tokens, sums, batch_size, checkpoint)
    xx, xy = (torch.cat([moments.totals[name].cpu() for moments in sums]) for name in ("xx", "xy"))
    return xx, xy


def capture_distances(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    weights: Float[Tensor, "layer row fit"],
    *,
    skip: int = 0,
    batch_size: int = 32,
    checkpoint: StreamCheckpoint | None = None,
) -> Float[Tensor, "seq layer fit"]:
    """Return how far, in positions, each fit's prediction is from the index, on average.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        tokens: sequences of equal length.
        weights: weights of each block's fits; the last row is the constant.
        skip: first positions to leave out.
        batch_size: sequences per forward pass.
        checkpoint: deals out batches to processes and saves sums; see `stream`.
    """
    blocks = layers_of(model)[: len(weights)]
    distances = [
        DistanceAccumulator(layer, len(tokens), fits, skip)
        for layer, fits in zip(blocks, weights, strict=True)
    ]
    _stream(model, tokens, distances, batch_size, checkpoint)
    return torch.stack([accumulator.totals["distances"].cpu() for accumulator in distances], 1)


def _stream(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    accumulators: Sequence[ResidualAccumulator],
    batch_size: int,
    checkpoint: StreamCheckpoint | None,
) -> None:
    stream(
        model,
        tokens,
        accumulators,
        fold_of=torch.arange(len(tokens)),  # the accumulators look up their targets by sequence
        end=accumulators[-1].layer.point("hook_resid_post"),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )


class ResidualAccumulator(Accumulator):
    """Sums over positions of one block's output.

    Attributes:
        layer: the block.
        skip: how many first positions are left out.
    """

    def __init__(self, layer: Layer, n_folds: int, skip: int) -> None:
        super().__init__(n_folds)
        self.layer, self.skip = layer, skip

    def hooks(self) -> Iterator[Attachment]:
        yield self.layer.point("hook_resid_post"), self.update

    def update(self, tensor: Float[Tensor, "batch pos d_model"], hook: HookPoint) -> None:
        """Add a batch."""
        if not self.already_counted:
            kept = tensor[:, self.skip :].double()
            self.add_rows(torch.cat([kept, kept.new_ones(*kept.shape[:2], 1)], -1))

    @abstractmethod
    def add_rows(self, x: Float[Tensor, "batch pos row"]) -> None:
        """Add a batch of residuals, a last column of ones included."""


class MomentAccumulator(ResidualAccumulator):
    """Sums X'X and X'y."""

    def __init__(self, layer: Layer, targets: Targets, skip: int) -> None:
        super().__init__(layer, 1, skip)
        self.targets = targets[:, skip:].double()

    def add_rows(self, x: Float[Tensor, "batch pos row"]) -> None:
        """Add a batch's products."""
        y = rearrange(self.targets[self.fold_of], "seq pos target -> (seq pos) target")
        rows = rearrange(x, "seq pos row -> (seq pos) row")
        self.add(xx=[(0, rows.T @ rows)], xy=[(0, rows.T @ y.to(rows.device))])


class DistanceAccumulator(ResidualAccumulator):
    """Keeps every sequence's mean absolute difference between prediction and index."""

    def __init__(
        self, layer: Layer, n_seqs: int, weights: Float[Tensor, "row fit"], skip: int
    ) -> None:
        super().__init__(layer, n_seqs, skip)
        self.weights = weights.double()

    def add_rows(self, x: Float[Tensor, "batch pos row"]) -> None:
        """Add the distances of a batch's sequences."""
        predicted = x @ self.weights.to(x.device)
        index = torch.arange(self.skip, self.skip + x.shape[1], device=x.device)
        distances = (predicted - index[:, None]).abs().mean(1)
        self.add(distances=list(zip(self.fold_of.tolist(), distances, strict=True)))
