"""Sum scores by groups of coordinates of each head, such as RoPE's bands.

A score is a sum over the coordinates of q and k, so its map is the sum of the groups' maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention, sum_query_groups
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.model import Inputs, layers_of
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.accumulators import MapAccumulator
from nope_probe.hooks.reading.streaming import StreamCheckpoint, stream
from nope_probe.maps.folds import folds_of, product_parts
from nope_probe.maps.rows import QueryPositions, chosen_rows

Groups = Sequence[Sequence[int]]  # the coordinates of each group, of one layer


class BandAccumulator(MapAccumulator):
    """Sums one layer's scores per fold and group of coordinates, over heads and sequences."""

    reads_attention = True

    def __init__(
        self,
        layer: Layer,
        n_folds: int,
        coordinates: Groups,
        query_positions: QueryPositions = None,
    ) -> None:
        super().__init__(layer, n_folds, query_positions)
        self.coordinates = coordinates

    def read(self, attention: Attention) -> None:
        """Add one batch's scores."""
        if self.already_counted:
            return
        self.see(attention.mask)
        k, scale = attention.k, attention.scale / attention.n_heads
        q = sum_query_groups(attention.q, k.shape[2]) * scale
        parts = {
            f"{index}/{group.name}": product_parts(
                q[:, group.queries][..., list(chosen)].flatten(2),
                k[:, : group.stop][..., list(chosen)].flatten(2),
                self.fold_of,
                self.n_folds,
            )
            for index, chosen in enumerate(self.coordinates)
            if chosen
            for group in self.groups
        }
        self.add(**parts)

    def fold_means(self, counts: Int[Tensor, " fold"]) -> Float[Tensor, "fold band row key_pos"]:
        """Return the mean map of each fold and group, nats; NaN where the model masks.

        A group without coordinates adds nothing to a score.
        """
        bands = [
            self.joined(self.means(f"{index}/", counts)) if chosen else None
            for index, chosen in enumerate(self.coordinates)
        ]
        zeros = next(0 * band for band in bands if band is not None)
        return torch.stack([zeros if band is None else band for band in bands], 1)


def capture_bands(
    model: HookedModel,
    inputs: Inputs,
    groups: Sequence[Groups],
    *,
    batch_size: int = 32,
    n_folds: int | None = None,
    documents: Int[Tensor, " seq"] | None = None,
    query_rows: int | None = None,
    checkpoint: StreamCheckpoint | None = None,
) -> Float[Tensor, "fold layer band row key_pos"]:
    """Average the scores of the first layers by groups of coordinates, over sequences and heads.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: token sequences of equal length, or input vectors.
        groups: for every layer read, the coordinates of each group. A layer's groups share no
            coordinate; groups that hold all coordinates have maps that add up to the map.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals; by default 8, or as
            many as there are sequences (documents) if these are fewer.
        documents: the document of each sequence; a document's sequences share a fold.
        query_rows: how many rows the maps have; see `capture_scores`.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Raises:
        NotImplementedError: for soft-capped scores, which are no sum over coordinates.
    """
    layers = layers_of(model)[: len(groups)]
    capped = [layer.index for layer in layers if layer.soft_cap is not None]
    if capped:
        raise NotImplementedError(f"the scores of L{capped[0]} are soft-capped: they are no sum")
    fold_of = folds_of(len(inputs), n_folds, documents)
    counts, queries = fold_of.bincount(), chosen_rows(inputs.shape[1], query_rows)
    accumulators = [
        BandAccumulator(layer, len(counts), of_layer, queries)
        for layer, of_layer in zip(layers, groups, strict=True)
    ]
    stream(
        model,
        inputs,
        accumulators,
        fold_of=fold_of,
        end=layers[-1].point("attn.hook_attn_scores"),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    return torch.stack([accumulator.fold_means(counts) for accumulator in accumulators], 1)
