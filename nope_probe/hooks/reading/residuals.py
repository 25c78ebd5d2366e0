"""Stream sequences through a model for a ridge regression on the residual stream after each block.

The regression needs only the sums X'X and X'y of the residuals, and its evaluation a prediction
per position. Only one batch of residual streams is in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.streaming import Stream, stream
from nope_probe.maps.folds import FoldSum

Targets = Float[Tensor, "seq pos target"]
Residuals = Float[Tensor, "batch pos row"]
FoldSums = dict[str, list[FoldSum]]


def capture_moments(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    targets: Targets,
    *,
    n_layers: int | None = None,
    skip: int = 0,
    batch_size: int = 32,
    checkpoint: Stream | None = None,
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
    kept = targets[:, skip:].double()

    def products(x: Residuals, numbers: Int[Tensor, " batch"]) -> FoldSums:
        y = rearrange(kept[numbers], "seq pos target -> (seq pos) target")
        rows = rearrange(x, "seq pos row -> (seq pos) row")
        return {"xx": [(0, rows.T @ rows)], "xy": [(0, rows.T @ y.to(rows.device))]}

    blocks = layers_of(model)[:n_layers]
    sums = [ResidualAccumulator(layer, 1, skip, products) for layer in blocks]
    stream(model, tokens, sums, torch.arange(len(tokens)), batch_size, checkpoint)
    xx, xy = (torch.cat([moments.totals[name].cpu() for moments in sums]) for name in ("xx", "xy"))
    return xx, xy


def capture_distances(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    weights: Float[Tensor, "layer row fit"],
    *,
    skip: int = 0,
    batch_size: int = 32,
    checkpoint: Stream | None = None,
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

    def distances(fits: Tensor, x: Residuals, numbers: Int[Tensor, " batch"]) -> FoldSums:
        predicted = x @ fits.double().to(x.device)
        index = torch.arange(skip, skip + x.shape[1], device=x.device)
        errors = (predicted - index[:, None]).abs().mean(1)
        return {"distances": list(zip(numbers.tolist(), errors, strict=True))}

    sums = [
        ResidualAccumulator(layer, len(tokens), skip, partial(distances, fits))
        for layer, fits in zip(layers_of(model), weights, strict=False)
    ]
    stream(model, tokens, sums, torch.arange(len(tokens)), batch_size, checkpoint)
    return torch.stack([accumulator.totals["distances"].cpu() for accumulator in sums], 1)


class ResidualAccumulator(Accumulator):
    """Sums over positions of one block's output.

    Args:
        layer: the block.
        n_folds: how many folds.
        skip: how many first positions are left out.
        parts: returns a batch's parts of the totals, from its residuals in float64 with a last
            column of ones, and the numbers of its sequences, by which their targets are known.
    """

    def __init__(
        self,
        layer: Layer,
        n_folds: int,
        skip: int,
        parts: Callable[[Residuals, Int[Tensor, " batch"]], FoldSums],
    ) -> None:
        super().__init__(n_folds)
        self.layer, self.skip, self.parts = layer, skip, parts

    def hooks(self) -> Iterator[Attachment]:
        yield self.layer.point("hook_resid_post"), self.update

    def update(self, tensor: Float[Tensor, "batch pos d_model"], hook: HookPoint) -> None:
        """Add a batch."""
        kept = tensor[:, self.skip :].double()
        x = torch.cat([kept, kept.new_ones(*kept.shape[:2], 1)], -1)
        self.add(**self.parts(x, self.fold_of))
