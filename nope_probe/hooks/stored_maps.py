"""StoredMaps: score maps whose folds stay in a file until a block of their rows is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.accumulators import State
from nope_probe.hooks.folds import pack_triangle, pooled, unpack_triangle
from nope_probe.hooks.layer_folds import PackedFolds, Stored
from nope_probe.hooks.maps import ScoreMaps


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """The score maps of one layer, nats.

    Attributes:
        folds: fold means at and below the diagonal.
        mean: [query_pos, key_pos], the mean over all sequences; masked cells are NaN.
        mean_term: the fold means of the mean term, where it was kept.
        key_means: [fold, pos, width], the mean key of each position, where it was kept.
    """

    folds: PackedFolds
    mean: Stored
    mean_term: PackedFolds | None = None
    key_means: Stored | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class StoredMaps:
    """Mean attention scores per layer, of which folds are kept at and below the diagonal.

    Attributes:
        layers: the maps of each layer.
        counts: sequences per fold.
        bos: whether all sequences begin with the same token, an attention sink.
    """

    layers: tuple[StoredLayer, ...]
    counts: Int[Tensor, " fold"]
    bos: bool = False

    def __repr__(self) -> str:
        """Return sizes."""
        return (
            f"StoredMaps: {len(self.layers)} layers of {self.n} positions, "
            f"means over {int(self.counts.sum())} sequences in {len(self.counts)} folds"
        )

    @property
    def n(self) -> int:
        """How many positions."""
        return self.layers[0].folds.n

    @property
    def mean(self) -> Float[Tensor, "layer query_pos key_pos"]:
        """The mean over all sequences, of all layers."""
        return torch.stack([layer.mean[...] for layer in self.layers])

    @property
    def folds(self) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """All fold means in memory at once; NaN above the diagonal."""
        return torch.stack([unpack_triangle(each.folds.cells[...]) for each in self.layers], 1)

    @classmethod
    def of(cls, maps: ScoreMaps) -> StoredMaps:
        """Return score maps packed, in memory."""
        return cls.from_stored(packed_tensors(maps))

    @classmethod
    def from_stored(cls, stored: Mapping[str, Stored]) -> StoredMaps:
        """Return the maps from the tensors of `packed_tensors`, wherever they are."""
        n_layers = sum(name.endswith("/mean") for name in stored)
        layers = tuple(_layer(stored, f"{layer}/") for layer in range(n_layers))
        return cls(layers=layers, counts=stored["counts"][...], bos=bool(stored["bos"][...]))


def _layer(stored: Mapping[str, Stored], prefix: str) -> StoredLayer:
    mean_term = stored.get(f"{prefix}mean_term")
    return StoredLayer(
        folds=PackedFolds(stored[f"{prefix}folds"]),
        mean=stored[f"{prefix}mean"],
        mean_term=None if mean_term is None else PackedFolds(mean_term),
        key_means=stored.get(f"{prefix}key_means"),
    )


def packed_tensors(maps: ScoreMaps) -> State:
    """Return the tensors of score maps by name, folds as lower triangles, for `from_stored`."""
    tensors = {"counts": maps.counts, "bos": torch.tensor(maps.bos)}
    for layer in range(maps.folds.shape[1]):
        folds = maps.folds[:, layer]
        tensors[f"{layer}/folds"] = pack_triangle(folds)
        tensors[f"{layer}/mean"] = pooled(folds, maps.counts)
        if maps.mean_term is not None:
            tensors[f"{layer}/mean_term"] = pack_triangle(maps.mean_term[:, layer])
        if maps.key_means is not None:
            tensors[f"{layer}/key_means"] = maps.key_means[:, layer]
    return tensors


def concatenate_layers(maps: Sequence[StoredMaps]) -> StoredMaps:
    """Return the maps of single layers as one."""
    return StoredMaps(
        layers=tuple(chain.from_iterable(each.layers for each in maps)),
        counts=maps[0].counts,
        bos=maps[0].bos,
    )
