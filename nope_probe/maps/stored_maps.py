"""Fold maps that are read a block of rows at a time, from memory or from a file.

`StoredMaps` are score maps whose folds stay in a file until a block of their rows is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import EllipsisType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps.centred import KeptCells, first_visible_keys
from nope_probe.maps.folds import State, pack_triangle, pooled, unpack_triangle
from nope_probe.maps.maps import ScoreMaps


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """The score maps of one layer, nats.

    Attributes:
        index: the block's number.
        folds: fold means at and below the diagonal.
        mean: [query_pos, key_pos], the mean over all sequences; masked cells are NaN.
        mean_term: the fold means of the mean term, where it was kept.
        key_means: [fold, pos, width], the mean key of each position, where it was kept.
    """

    index: int
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
        numbers = sorted(int(name.split("/")[0]) for name in stored if name.endswith("/mean"))
        layers = tuple(_layer(stored, number) for number in numbers)
        return cls(layers=layers, counts=stored["counts"][...], bos=bool(stored["bos"][...]))


def _layer(stored: Mapping[str, Stored], number: int) -> StoredLayer:
    mean_term = stored.get(f"{number}/mean_term")
    return StoredLayer(
        index=number,
        folds=PackedFolds(stored[f"{number}/folds"]),
        mean=stored[f"{number}/mean"],
        mean_term=None if mean_term is None else PackedFolds(mean_term),
        key_means=stored.get(f"{number}/key_means"),
    )


def packed_tensors(maps: ScoreMaps) -> State:
    """Return the tensors of score maps by name, folds as lower triangles, for `from_stored`."""
    tensors = {"counts": maps.counts, "bos": torch.tensor(maps.bos)}
    for place, layer in enumerate(maps.layers):
        folds = maps.folds[:, place]
        tensors[f"{layer}/folds"] = pack_triangle(folds)
        tensors[f"{layer}/mean"] = pooled(folds, maps.counts)
        if maps.mean_term is not None:
            tensors[f"{layer}/mean_term"] = pack_triangle(maps.mean_term[:, place])
        if maps.key_means is not None:
            tensors[f"{layer}/key_means"] = maps.key_means[:, place]
    return tensors


def concatenate_layers(maps: Sequence[StoredMaps]) -> StoredMaps:
    """Return the maps of single layers as one."""
    return StoredMaps(
        layers=tuple(chain.from_iterable(each.layers for each in maps)),
        counts=maps[0].counts,
        bos=maps[0].bos,
    )


BLOCK_BYTES = 1 << 22  # of a block of rows, so that what is done with it stays in the cache

Index = int | slice | EllipsisType


@runtime_checkable
class Stored(Protocol):
    """A tensor, or one in a file of which the parts are read that are asked for."""

    @property
    def shape(self) -> Sequence[int]:
        """The size of each dimension."""

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Return a part, all of it for `...`."""


class LayerFolds(ABC):
    """The fold maps of one layer.

    Attributes:
        n_folds: how many folds.
        n: how many positions.
    """

    n_folds: int
    n: int

    @cached_property
    @abstractmethod
    def first_keys(self) -> Int[Tensor, " query_pos"]:
        """The first key that each query sees, 0 without a window."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        """Return the queries from start to stop - 1, with the keys before `stop`."""


class TensorFolds(LayerFolds):
    """Fold maps in memory.

    Example:
        >>> TensorFolds(torch.zeros(4, 7, 7)).rows(2, 5).shape
        torch.Size([4, 3, 5])
    """

    def __init__(self, folds: Float[Tensor, "fold query_pos key_pos"]) -> None:
        self.folds, self.n_folds, self.n = folds, folds.shape[0], folds.shape[-1]

    @cached_property
    def first_keys(self) -> Int[Tensor, " query_pos"]:
        return first_visible_keys(self.folds[0])

    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        return self.folds[:, start:stop, :stop]


class PackedFolds(LayerFolds):
    """Lower triangles of fold maps, as `pack_triangle` returns them, in memory or in a file.

    Args:
        cells: [fold, cell], row by row; what is above the diagonal is NaN in `rows`.
    """

    def __init__(self, cells: Stored) -> None:
        self.cells, self.n_folds = cells, cells.shape[0]
        self.n = triangle_size(cells.shape[1])

    @cached_property
    def first_keys(self) -> Int[Tensor, " query_pos"]:
        cells = self.cells[0]
        if not cells.isnan().any():
            return torch.zeros(self.n, dtype=torch.long)
        return first_visible_keys(unpack_triangle(cells))

    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        first = n_cells(start)
        cells = self.cells[:, first : n_cells(stop)]
        rows = cells.new_full((self.n_folds, stop - start, stop), torch.nan)
        for row in range(start, stop):  # a copy per row is faster than one by index
            place = n_cells(row) - first
            rows[:, row - start, : row + 1] = cells[:, place : place + row + 1]
        return rows


def shared_cells(layers: Iterable[LayerFolds], skip_keys: int) -> KeptCells:
    """Return the cells on which all of some maps have a pattern.

    Without its window a layer sees more keys: its pattern is compared on those that the window
    leaves.

    Raises:
        ValueError: if no row has two of them.
    """
    first = torch.stack([layer.first_keys for layer in layers]).amax(0)
    return KeptCells.of(first, skip_keys)


def windows_of(layers: Mapping[int, LayerFolds]) -> dict[str, int]:
    """Return how many keys a query sees at most, itself included, of the layers with a window.

    Args:
        layers: the fold maps of each layer by its number.
    """
    cells = {f"L{layer}": KeptCells.of(folds.first_keys, 0) for layer, folds in layers.items()}
    return {name: 1 + int(kept.n_keys.max()) for name, kept in cells.items() if kept.first.any()}


def n_cells(n: int) -> int:
    """Return the number of cells of a triangle of n rows, diagonal included."""
    return n * (n + 1) // 2


def triangle_size(cells: int) -> int:
    """Return the number of rows of a triangle, from that of its cells.

    Example:
        >>> triangle_size(n_cells(1024))
        1024
    """
    return (int((8 * cells + 1) ** 0.5) - 1) // 2


def row_blocks(n: int, n_maps: int, n_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield the blocks (start, stop) of rows of which n_maps float64 maps fit into some bytes.

    Example:
        >>> list(row_blocks(7, n_maps=2, n_bytes=400))
        [(0, 3), (3, 6), (6, 7)]
    """
    size = max(1, n_bytes // (8 * n_maps * n))
    for start in range(0, n, size):
        yield start, min(start + size, n)
