"""Captured attention: the mean weights of every head, and its mean information, by folds."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.maps.folds import State, pooled, tensors_of


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionMaps:
    """The mean attention weights and scores of every head, and its mean information, in nats.

    Attributes:
        weights: fold means of the attention weights; 0 where the model masks.
        scores: fold means of the scores, nats; NaN where the model masks.
        information: fold means of KL(A, U), of a query's weights above uniform ones, nats.
        others: fold means of (1 - a) KL(A', U'), the part among the other keys, nats.
        visible: the cells that the model does not mask.
        counts: sequences per fold.
        layers: the number of each layer's block, in the order of the maps.
        skip_keys: how many first keys stand apart from the other keys.
        query_positions: the queries of the rows.
    """

    weights: Float[Tensor, "fold layer head row key_pos"]
    scores: Float[Tensor, "fold layer head row key_pos"]
    information: Float[Tensor, "fold layer head row"]
    others: Float[Tensor, "fold layer head row"]
    visible: Bool[Tensor, "layer row key_pos"]
    counts: Int[Tensor, " fold"]
    layers: tuple[int, ...]
    skip_keys: int
    query_positions: Int[Tensor, " row"]

    def __repr__(self) -> str:
        """Return sizes, and how much data the means are taken over."""
        n_layers, n_heads, n_rows, n = self.weights.shape[1:]
        return (
            f"AttentionMaps: {n_layers} layers of {n_heads} heads, {n_rows} queries × {n} keys\n"
            f"means over {int(self.counts.sum())} sequences in {len(self.counts)} folds"
        )

    @property
    def mean(self) -> Float[Tensor, "layer head row key_pos"]:
        """The mean weights over all sequences; 0 where the model masks."""
        return pooled(self.weights, self.counts)

    def to_tensors(self) -> State:
        """Return the maps by name, for `from_tensors`."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: State) -> AttentionMaps:
        """Return the maps that `to_tensors` turned into these tensors."""
        others = {n: x for n, x in tensors.items() if n not in ("layers", "skip_keys")}
        layers = tuple(tensors["layers"].tolist())
        return cls(**others, layers=layers, skip_keys=int(tensors["skip_keys"]))
