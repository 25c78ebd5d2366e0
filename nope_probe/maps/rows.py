"""The rows of maps: the queries that a map keeps, and the storage of its cells.

Up to 2,048 positions, a map has the row of every query. Above that, it has the rows of some
queries, because 512 rows of a positional pattern show as much as 32,768 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.maps import default_rows

QueryPositions: TypeAlias = Int[Tensor, " row"] | None  # None: the map has the row of every query

LAST_ROWS = 64  # the last chosen rows are consecutive, so that neighbours can be compared
GROUP_ROWS = 64  # rows that are added up together
BLOCK_BYTES = 1 << 22  # size of a block of rows, so that operations on it stay in the cache


def choose_rows(n: int, query_rows: int | None = None) -> Int[Tensor, " row"]:
    """Return the queries whose rows are kept: evenly spread queries, then a run at the end.

    Args:
        n: how many positions there are.
        query_rows: how many rows; by default all up to 2,048 positions, and 512 above.

    Raises:
        UserError: for no rows, or more rows than positions.

    Example:
        >>> choose_rows(19, 8).tolist()
        [2, 6, 10, 14, 15, 16, 17, 18]
    """
    if query_rows is None:
        query_rows = default_rows(n)
    if not 1 <= query_rows <= n:
        raise UserError(f"expected from 1 to {n} rows at {n} positions, got {query_rows}")
    n_last = min(LAST_ROWS, (query_rows + 1) // 2)
    n_spread = query_rows - n_last
    spread = (torch.arange(n_spread) + 1) * (n - n_last) // max(1, n_spread) - 1
    return torch.cat((spread, torch.arange(n - n_last, n)))


def chosen_rows(n: int, query_rows: int | None) -> QueryPositions:
    """Return the queries whose rows are kept, or None for all; see `choose_rows`."""
    queries = choose_rows(n, query_rows)
    return None if len(queries) == n else queries


def rows_of(n_rows: int, query_positions: QueryPositions) -> Int[Tensor, " row"]:
    """Return the queries of the rows: the given queries, or 0, 1, 2, ...

    Raises:
        UserError: if there are not as many queries as rows.
    """
    if query_positions is None:
        return torch.arange(n_rows)
    if len(query_positions) != n_rows:
        raise UserError(f"expected {n_rows} query positions, got {len(query_positions)}")
    return query_positions


@dataclass(frozen=True, eq=False)
class MapRows:
    """The rows of maps.

    Attributes:
        queries: the queries of the rows, in order.
        n: how many positions, and so keys.
    """

    queries: Int[Tensor, " row"]
    n: int

    @classmethod
    def of(
        cls, maps: Float[Tensor, "*batch row key_pos"], queries: QueryPositions = None
    ) -> MapRows:
        """Return the rows of maps, by default of the queries 0, 1, 2, ..."""
        return cls(rows_of(maps.shape[-2], queries), maps.shape[-1])

    @classmethod
    def of_cells(cls, n_cells: int, queries: QueryPositions = None) -> MapRows:
        """Return the rows of packed maps of so many cells, by default of all queries."""
        if queries is None:
            queries = torch.arange(isqrt(2 * n_cells))  # n(n + 1)/2 cells have n rows
        return cls(queries, int(queries[-1]) + 1)

    def blocks(self, n_maps: int, n_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """Yield blocks of consecutive queries with rows, as (start, stop).

        For chosen rows, torch runs on one thread: most blocks are a single row, and
        sharing an operation on a row among threads takes longer than the operation.

        Args:
            n_maps: how many float64 maps a block holds.
            n_bytes: how many bytes a block may take.

        Example:
            >>> list(MapRows(torch.arange(7), 7).blocks(n_maps=2, n_bytes=400))
            [(0, 3), (3, 6), (6, 7)]
            >>> list(MapRows(torch.tensor([2, 4, 5, 6]), 7).blocks(n_maps=2, n_bytes=400))
            [(2, 3), (4, 7)]
        """
        size = max(1, n_bytes // (8 * n_maps * self.n))
        ends = (self.queries.diff() > 1).nonzero().flatten() + 1
        with one_thread() if len(ends) else nullcontext():
            for run in self.queries.tensor_split(ends):
                first, behind = int(run[0]), int(run[-1]) + 1
                for start in range(first, behind, size):
                    yield start, min(start + size, behind)

    @cached_property
    def starts(self) -> list[int]:
        """The start of each row's cells in packed maps, and at the end the number of cells.

        Example:
            >>> MapRows(torch.tensor([0, 1, 4]), 5).starts
            [0, 1, 3, 8]
        """
        return [0, *(self.queries + 1).cumsum(0).tolist()]

    def pack(self, maps: Float[Tensor, "*batch row key_pos"]) -> Float[Tensor, "*batch cell"]:
        """Return the cells j <= i of maps, row by row.

        Example:
            >>> maps = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
            >>> MapRows.of(maps).pack(maps)
            tensor([1., 2., 3.])
        """
        return maps[..., *self._cells]

    def unpack(self, cells: Float[Tensor, "*batch cell"]) -> Float[Tensor, "*batch row key_pos"]:
        """Return maps from their cells j <= i, NaN above the diagonal.

        Example:
            >>> MapRows.of_cells(3).unpack(torch.tensor([1.0, 2.0, 3.0]))
            tensor([[1., nan],
                    [2., 3.]])
        """
        shape = *cells.shape[:-1], len(self.queries), self.n
        maps = cells.new_full(shape, torch.nan)
        maps[..., *self._cells] = cells
        return maps

    @property
    def _cells(self) -> tuple[Tensor, Tensor]:
        """The row and key of the cells j <= i."""
        row, column = (torch.arange(self.n) <= self.queries[:, None]).nonzero().T
        return row, column


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroup:
    """Rows that are added up together, with the keys up to their last query.

    Attributes:
        name: the name of the group's sums.
        queries: the queries of the rows, or all.
        stop: how many first keys the rows have.
    """

    name: str
    queries: Int[Tensor, " row"] | slice
    stop: int


def join_groups(
    blocks: Iterable[Float[Tensor, "*batch row key_pos"]],
    groups: Sequence[RowGroup],
    visible: Bool[Tensor, "row key_pos"],
) -> Float[Tensor, "*batch row key_pos"]:
    """Return maps from the rows of their groups, NaN where the model masks.

    Maps of chosen rows are in float32, because they belong to long sequences.

    Args:
        blocks: the rows of each group, with its keys.
        groups: the groups of rows, in order.
        visible: the cells that are not masked.
    """
    if len(groups) == 1 and isinstance(groups[0].queries, slice):
        (whole,) = blocks
        return whole.masked_fill_(~visible, torch.nan)
    first, joined = 0, torch.empty(0)
    for block in blocks:
        if not first:
            joined = torch.full((*block.shape[:-2], *visible.shape), torch.nan)
        rows = slice(first, first + block.shape[-2])
        hidden = ~visible[rows, : block.shape[-1]]
        joined[..., rows, : block.shape[-1]] = block.float().masked_fill_(hidden, torch.nan)
        first = rows.stop
    return joined
