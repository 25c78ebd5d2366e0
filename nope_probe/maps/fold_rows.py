"""Where the fold maps of a layer are kept: in memory, or packed at and below the diagonal.

Both are read by blocks of rows. Packed maps may be mapped from a file, which a block is read from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps.centred import first_visible_keys
from nope_probe.maps.rows import MapRows


class FoldRows(ABC):
    """Fold maps of one layer, as they are kept.

    Attributes:
        n_folds: how many folds.
        where: the queries of the rows, and their keys.
    """

    n_folds: int
    where: MapRows

    @property
    @abstractmethod
    def maps(self) -> Float[Tensor, "fold row key_pos"]:
        """All rows in memory."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        """Return the rows of the queries from start to stop - 1, with the keys before `stop`."""

    @abstractmethod
    def cells_of(self, fold: int) -> Float[Tensor, " cell"]:
        """Return the cells j <= i of one fold, row by row."""

    @cached_property
    @abstractmethod
    def first_keys(self) -> Int[Tensor, " row"]:
        """Each row's first visible key, 0 without a window."""

    def _rows_between(self, start: int, stop: int) -> slice:
        """Return the places of the rows of consecutive queries."""
        first = int(torch.searchsorted(self.where.queries, start))
        return slice(first, first + stop - start)


class TensorFolds(FoldRows):
    """Fold maps in memory.

    Example:
        >>> maps = torch.zeros(4, 7, 7)
        >>> TensorFolds(maps, MapRows.of(maps)).rows(2, 5).shape
        torch.Size([4, 3, 5])
    """

    def __init__(self, folds: Float[Tensor, "fold row key_pos"], where: MapRows) -> None:
        self.folds, self.n_folds, self.where = folds, folds.shape[0], where

    @property
    def maps(self) -> Float[Tensor, "fold row key_pos"]:
        return self.folds

    def cells_of(self, fold: int) -> Float[Tensor, " cell"]:
        return self.where.pack(self.folds[fold])

    @cached_property
    def first_keys(self) -> Int[Tensor, " row"]:
        return first_visible_keys(self.folds[0], self.where)

    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        return self.folds[:, self._rows_between(start, stop), :stop]


class PackedFolds(FoldRows):
    """The cells j <= i of fold maps, as `MapRows` packs them, in memory or in a file.

    Args:
        cells: [fold, cell], row by row; cells above the diagonal are NaN in `rows`.
        where: the rows.
    """

    def __init__(self, cells: Float[Tensor, "fold cell"], where: MapRows) -> None:
        self.cells, self.n_folds, self.where = cells, cells.shape[0], where

    @property
    def maps(self) -> Float[Tensor, "fold row key_pos"]:
        return self.where.unpack(self.cells)

    def cells_of(self, fold: int) -> Float[Tensor, " cell"]:
        return self.cells[fold]

    @cached_property
    def first_keys(self) -> Int[Tensor, " row"]:
        cells = self.cells[0]
        if not cells.isnan().any():
            return torch.zeros(len(self.where.queries), dtype=torch.long)
        return first_visible_keys(self.where.unpack(cells), self.where)

    def rows(self, start: int, stop: int) -> Float[Tensor, "fold row key_pos"]:
        places, starts = self._rows_between(start, stop), self.where.starts
        first = starts[places.start]
        cells = self.cells[:, first : starts[places.stop]]
        rows = cells.new_full((self.n_folds, stop - start, stop), torch.nan)
        for row in range(start, stop):  # a copy per row is faster than a copy by index
            place = starts[places.start + row - start] - first
            rows[:, row - start, : row + 1] = cells[:, place : place + row + 1]
        return rows
