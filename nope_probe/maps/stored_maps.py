"""Fold maps that are read a block of rows at a time, from memory or from a file.

`StoredMaps` are score maps whose folds stay in a file until a block of rows is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import EllipsisType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.maps.centred import KeptCells, first_visible_keys
from nope_probe.maps.folds import State, pooled
from nope_probe.maps.maps import ScoreMaps
from nope_probe.maps.rows import (
    QueryPositions,
    cell_starts,
    pack_rows,
    rows_of,
    triangle_size,
    unpack_rows,
)


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """The score maps of one layer, nats.

    Attributes:
        index: the block's number.
        folds: fold means at and below the diagonal.
        mean: [row, key_pos], the mean over all sequences; masked cells are NaN.
        mean_term: the fold means of the mean term, if it was kept.
        key_means: [fold, pos, width], the mean key of each position, if it was kept.
    """

    index: int
    folds: PackedFolds
    mean: Stored
    mean_term: PackedFolds | None = None
    key_means: Stored | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class StoredMaps:
    """Mean attention scores per layer, whose folds are kept at and below the diagonal.

    Attributes:
        layers: the maps of each layer.
        counts: sequences per fold.
        bos: whether all sequences begin with the same token, an attention sink.
        per_head: [fold, layer, head, row, key_pos], the fold means of each head, if they were kept.
    """

    layers: tuple[StoredLayer, ...]
    counts: Int[Tensor, " fold"]
    bos: bool = False
    per_head: Stored | None = None

    def __repr__(self) -> str:
        """Return sizes."""
        return (
            f"StoredMaps: {len(self.layers)} layers, {len(self.query_positions)} queries × "
            f"{self.n} keys, means over {int(self.counts.sum())} sequences in "
            f"{len(self.counts)} folds"
        )

    @property
    def n(self) -> int:
        """How many positions."""
        return self.layers[0].folds.n

    @property
    def query_positions(self) -> Int[Tensor, " row"]:
        """The queries of the rows."""
        return self.layers[0].folds.query_positions

    @property
    def has_all_rows(self) -> bool:
        """Whether every query has a row."""
        return len(self.query_positions) == self.n

    @property
    def mean(self) -> Float[Tensor, "layer row key_pos"]:
        """The mean over all sequences, of all layers."""
        return torch.stack([layer.mean[...] for layer in self.layers])

    @property
    def folds(self) -> Float[Tensor, "fold layer row key_pos"]:
        """All fold means in memory at once; NaN above the diagonal."""
        return torch.stack([layer.folds.maps for layer in self.layers], 1)

    @classmethod
    def of(cls, maps: ScoreMaps) -> StoredMaps:
        """Return score maps packed, in memory."""
        return cls.from_stored(packed_tensors(maps))

    @classmethod
    def from_stored(cls, stored: Mapping[str, Stored]) -> StoredMaps:
        """Return the maps from the tensors of `packed_tensors`, in memory or in a file."""
        numbers = sorted(int(name.split("/")[0]) for name in stored if name.endswith("/mean"))
        layers = tuple(_layer(stored, number) for number in numbers)
        return cls(
            layers=layers,
            counts=stored["counts"][...],
            bos=bool(stored["bos"][...]),
            per_head=stored.get("per_head"),
        )


def _layer(stored: Mapping[str, Stored], number: int) -> StoredLayer:
    queries = stored["query_positions"][...] if "query_positions" in stored else None
    mean_term = stored.get(f"{number}/mean_term")
    return StoredLayer(
        index=number,
        folds=PackedFolds(stored[f"{number}/folds"], queries),
        mean=stored[f"{number}/mean"],
        mean_term=None if mean_term is None else PackedFolds(mean_term, queries),
        key_means=stored.get(f"{number}/key_means"),
    )


def packed_tensors(maps: ScoreMaps) -> State:
    """Return the tensors of score maps by name, folds as cells j <= i, for `from_stored`.

    The tensors include the queries of the rows if the maps do not have all rows.
    """
    tensors = {"counts": maps.counts, "bos": torch.tensor(maps.bos)}
    queries = maps.query_positions
    if not maps.has_all_rows:
        tensors["query_positions"] = queries
    if maps.per_head is not None:
        tensors["per_head"] = maps.per_head
    for place, layer in enumerate(maps.layers):
        folds = maps.folds[:, place]
        tensors[f"{layer}/folds"] = pack_rows(folds, queries)
        tensors[f"{layer}/mean"] = pooled(folds, maps.counts)
        if maps.mean_term is not None:
            tensors[f"{layer}/mean_term"] = pack_rows(maps.mean_term[:, place], queries)
        if maps.key_means is not None:
            tensors[f"{layer}/key_means"] = maps.key_means[:, place]
    return tensors


def concatenate_layers(maps: Sequence[StoredMaps]) -> StoredMaps:
    """Return maps of single layers as a single object."""
    return StoredMaps(
        layers=tuple(chain.from_iterable(stored.layers for stored in maps)),
        counts=maps[0].counts,
        bos=maps[0].bos,
    )


Index = int | slice | EllipsisType


@runtime_checkable
class Stored(Protocol):
    """A tensor in memory, or a tensor in a file whose parts are read on demand."""

    @property
    def shape(self) -> Sequence[int]:
        """The size of each dimension."""

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Return a part of the tensor, the whole for `...`."""


class LayerFolds(ABC):
    """The fold maps of one layer.

    Attributes:
        n_folds: how many folds.
        n: how many positions.
        query_positions: the queries of the rows.
    """

    n_folds: int
    n: int
    query_positions: Int[Tensor, " row"]

    @property
    @abstractmethod
    def maps(self) -> Float[Tensor, "fold row key_pos"]:
        """All rows in memory."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        """Return the rows of the queries from start to stop - 1, with the keys before `stop`."""

    def kept_cells(self, skip_keys: int) -> KeptCells:
        """Return the cells on which the patterns are defined.

        Raises:
            ValueError: if no row has two of them.
        """
        return KeptCells.of(self.first_keys, skip_keys, self.query_positions, self.n)

    @cached_property
    @abstractmethod
    def first_keys(self) -> Int[Tensor, " row"]:
        """Each row's first visible key, 0 without a window."""

    def _rows_between(self, start: int, stop: int) -> slice:
        """Return the places of the rows of consecutive queries."""
        first = int(torch.searchsorted(self.query_positions, start))
        return slice(first, first + stop - start)


class TensorFolds(LayerFolds):
    """Fold maps in memory.

    Example:
        >>> TensorFolds(torch.zeros(4, 7, 7)).rows(2, 5).shape
        torch.Size([4, 3, 5])
    """

    def __init__(
        self, folds: Float[Tensor, "fold row key_pos"], query_positions: QueryPositions = None
    ) -> None:
        self.folds, self.n_folds, self.n = folds, folds.shape[0], folds.shape[-1]
        self.query_positions = rows_of(folds.shape[-2], query_positions)

    @property
    def maps(self) -> Float[Tensor, "fold row key_pos"]:
        return self.folds

    @cached_property
    def first_keys(self) -> Int[Tensor, " row"]:
        return first_visible_keys(self.folds[0], self.query_positions)

    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        return self.folds[:, self._rows_between(start, stop), :stop]


class PackedFolds(LayerFolds):
    """The cells j <= i of fold maps, as `pack_rows` returns them, in memory or in a file.

    Args:
        cells: [fold, cell], row by row; cells above the diagonal are NaN in `rows`.
        query_positions: the queries of the rows; all by default.
    """

    def __init__(self, cells: Stored, query_positions: QueryPositions = None) -> None:
        self.cells, self.n_folds = cells, cells.shape[0]
        if query_positions is None:
            query_positions = torch.arange(triangle_size(cells.shape[1]))
        self.query_positions, self.n = query_positions, int(query_positions[-1]) + 1
        self.starts = cell_starts(query_positions).tolist()

    @property
    def maps(self) -> Float[Tensor, "fold row key_pos"]:
        return unpack_rows(self.cells[...], self.query_positions)

    @cached_property
    def first_keys(self) -> Int[Tensor, " row"]:
        cells = self.cells[0]
        if not cells.isnan().any():
            return torch.zeros(len(self.query_positions), dtype=torch.long)
        maps = unpack_rows(cells, self.query_positions)
        return first_visible_keys(maps, self.query_positions)

    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        places = self._rows_between(start, stop)
        first = self.starts[places.start]
        cells = self.cells[:, first : self.starts[places.stop]]
        rows = cells.new_full((self.n_folds, stop - start, stop), torch.nan)
        for row in range(start, stop):  # a copy per row is faster than a copy by index
            place = self.starts[places.start + row - start] - first
            rows[:, row - start, : row + 1] = cells[:, place : place + row + 1]
        return rows


def shared_cells(layers: Iterable[LayerFolds], skip_keys: int) -> KeptCells:
    """Return the cells on which several maps all have a pattern.

    Without its window a layer sees more keys. Its pattern is compared on the keys that the window
    leaves visible.

    Raises:
        UserError: if the maps differ in their positions, or in the queries of their rows.
        ValueError: if no row has two of them.
    """
    layers = list(layers)
    for layer in layers[1:]:
        if layer.n != layers[0].n:
            raise UserError(
                f"the maps are of {layer.n} and {layers[0].n} positions: capture both on as many"
            )
        if not layer.query_positions.equal(layers[0].query_positions):
            raise UserError("the maps have the rows of unlike queries: capture the same query_rows")
    first = torch.stack([layer.first_keys for layer in layers]).amax(0)
    return KeptCells.of(first, skip_keys, layers[0].query_positions, layers[0].n)


def windows_of(layers: Mapping[int, LayerFolds]) -> dict[str, int]:
    """Return the window of each layer that has one: how many keys a query sees, itself included.

    Args:
        layers: the fold maps of each layer by its number.
    """
    return {
        f"L{layer}": 1 + int(folds.kept_cells(0).n_keys.max())
        for layer, folds in layers.items()
        if folds.first_keys.any()
    }
