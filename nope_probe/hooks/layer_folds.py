"""Fold maps of one layer that are read a block of rows at a time, from memory or from a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

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

    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        first = n_cells(start)
        cells = self.cells[:, first : n_cells(stop)]
        rows = cells.new_full((self.n_folds, stop - start, stop), torch.nan)
        for row in range(start, stop):  # a copy per row is faster than one by index
            place = n_cells(row) - first
            rows[:, row - start, : row + 1] = cells[:, place : place + row + 1]
        return rows


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
