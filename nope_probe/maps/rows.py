"""The rows of maps: the queries that a map keeps, its cells, and rows less their means (patterns).

Up to 2,048 positions, a map has the row of every query. Above that, it has the rows of some
queries, because 512 rows of a positional pattern show as much as 32,768 rows.

Patterns are defined on the cells skip_keys <= j < i that the model does not mask. A sliding window
or a chunk leaves each query its latest keys, so the first visible key of each query determines the
cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.errors import UserError, kind_of
from nope_probe.maps import default_rows

QueryPositions: TypeAlias = Int[Tensor, " row"] | None  # None: the map has the row of every query
AnyRows: TypeAlias = Float[Tensor, "*map row key_pos"]

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


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptCells:
    """The cells on which patterns are defined: first[i] <= j < i, for the queries with rows.

    Attributes:
        first: the first kept key of every query; for a query without a row, the query itself.
        where: the queries of the rows, among all positions.
        skip_keys: how many first keys are left out for all queries.
        sees_first: whether a query has a row and sees all keys from key 0 on.

    Example:
        >>> rows = MapRows(torch.arange(5), 5)
        >>> KeptCells.of(torch.tensor([0, 0, 0, 1, 2]), 1, rows).n_keys.tolist()
        [0, 0, 1, 2, 2]
        >>> rows = MapRows(torch.tensor([2, 4]), 5)
        >>> KeptCells.of(torch.tensor([0, 0]), 0, rows).n_keys.tolist()
        [0, 0, 2, 0, 4]
    """

    first: Int[Tensor, " pos"]
    where: MapRows
    skip_keys: int
    sees_first: Bool[Tensor, " pos"]

    @classmethod
    def of(cls, first_visible: Int[Tensor, " row"], skip_keys: int, where: MapRows) -> KeptCells:
        """Return the cells of a layer, from each row's first visible key.

        Args:
            first_visible: the first key that a row's query sees.
            skip_keys: how many first keys to leave out.
            where: the rows.

        Raises:
            UserError: if no row has two such cells.
        """
        n = where.n
        if skip_keys in (0, 1) and n < 3 + skip_keys:
            raise UserError(f"expected sequences of {3 + skip_keys} positions or more, got {n}")
        if not 0 <= skip_keys <= n - 3:
            raise UserError(
                f"expected from 0 to {n - 3} skipped keys at {n} positions, got {skip_keys}"
            )
        first = torch.arange(n)
        first[where.queries] = first_visible.clamp_min(skip_keys)
        sees_first = torch.zeros(n, dtype=torch.bool)
        sees_first[where.queries] = first_visible == 0
        return cls(first=first, where=where, skip_keys=skip_keys, sees_first=sees_first)

    @property
    def n(self) -> int:
        """How many positions."""
        return len(self.first)

    @cached_property
    def n_keys(self) -> Int[Tensor, " pos"]:
        """The number of kept keys of each query."""
        return (torch.arange(self.n) - self.first).clamp_min(0)

    @cached_property
    def count(self) -> int:
        """The number of kept cells."""
        return int(self.n_keys.sum())

    @cached_property
    def by_distance(self) -> Float[Tensor, " distance"]:
        """The number of kept cells at i - j = 0, 1, ..., n - 1; it is 0 at 0."""
        n_rows = torch.bincount(self.n_keys, minlength=self.n).double()
        counts = n_rows.flip(0).cumsum(0).flip(0)  # a query of k keys has the distances 1 to k
        counts[0] = 0
        return counts

    def rows(self, start: int, stop: int) -> Bool[Tensor, "row key_pos"]:
        """Return the kept cells of the queries start to stop - 1 and the keys before stop."""
        return self.of_queries(torch.arange(start, stop), stop)

    @cached_property
    def mask(self) -> Bool[Tensor, "row key_pos"]:
        """The kept cells of all rows."""
        return self.of_queries(self.where.queries, self.n)

    def of_queries(self, queries: Int[Tensor, " row"], stop: int) -> Bool[Tensor, "row key_pos"]:
        """Return the kept cells of some queries and the keys before stop."""
        key = torch.arange(stop)
        return (key < queries[:, None]) & (key >= self.first[queries, None])


def first_visible_keys(
    maps: Float[Tensor, "*batch row key_pos"], where: MapRows | None = None
) -> Int[Tensor, "*batch row"]:
    """Return the first key j < i that is not masked (NaN), for the query i of each row.

    If the NaN cells of a map do not form a window or chunks, all keys count as visible. A query of
    a score map always sees itself. Patterns have no cell j = i, and are not checked for it.

    Example:
        >>> nan = torch.nan
        >>> first_visible_keys(torch.tensor([[1, nan, nan], [2, 3, nan], [nan, 4, 5]])).tolist()
        [0, 0, 1]
    """
    where = MapRows.of(maps) if where is None else where
    queries = where.queries.to(maps.device)
    before = torch.arange(maps.shape[-1], device=maps.device) < queries[:, None]
    visible = ~maps.isnan() & before
    first = visible.to(torch.uint8).argmax(-1)
    first = first.where(visible.any(-1), queries)
    no_self = maps[..., torch.arange(len(queries)), queries].isnan()
    is_band = (first.diff(dim=-1) >= 0).all(-1)
    is_band &= no_self.all(-1) | (~no_self.any(-1) & _is_window_or_chunks(first, queries))
    return first.where(is_band[..., None], 0).cpu()


def _is_window_or_chunks(
    first: Int[Tensor, "*batch row"], queries: Int[Tensor, " row"]
) -> Bool[Tensor, "*batch"]:
    """Return whether first visible keys are those of a sliding window, or of chunks from key 0."""
    window = (queries - (queries[-1] - first[..., -1:])).clamp_min(0)
    # If chunks of some size fit, chunks of the greatest common divisor fit, too.
    size = torch.from_numpy(np.gcd.reduce(first.cpu().numpy(), -1, keepdims=True)).to(first)
    chunks = queries // size.clamp_min(1) * size
    return (first == window).all(-1) | (first == chunks).all(-1)


def row_centred(
    maps: Float[Tensor, "*batch row key_pos"],
    skip_keys: int = 0,
    query_positions: QueryPositions = None,
) -> Float[Tensor, "*batch row key_pos"]:
    """Subtract from each row its mean over skip_keys <= j < i: the pattern in a score map.

    Other cells become NaN. Cells that a window hides are NaN, and do not count in a mean.

    Args:
        maps: score maps, nats.
        skip_keys: how many first keys to leave out.
        query_positions: the queries of the rows; all by default.

    Raises:
        UserError: for what is no tensor.
        ValueError: for a non-finite cell among j < i that no window hides.

    Example:
        >>> row_centred(torch.tensor([[0., 0, 0], [5, 0, 0], [1, 3, 0]]))
        tensor([[nan, nan, nan],
                [ 0., nan, nan],
                [-1.,  1., nan]])
    """
    if not isinstance(maps, Tensor):
        raise UserError(
            f"expected a tensor [..., row, key_pos], such as maps.mean, got {kind_of(maps)}"
        )
    where = MapRows.of(maps, query_positions)
    visible = torch.arange(where.n) >= first_visible_keys(maps, where)[..., None]
    cells = visible & KeptCells.of(torch.zeros_like(where.queries), skip_keys, where).mask
    return centred_rows(maps, cells).where(cells, torch.nan)


def centred_rows(rows: AnyRows, cells: Bool[Tensor, "*#map row key_pos"]) -> AnyRows:
    """Return a block of rows less their means over the kept cells, 0 elsewhere.

    Args:
        rows: scores of some queries, with the keys up to the last query.
        cells: the kept cells of the rows.

    Raises:
        ValueError: for a kept cell that is not finite.
    """
    inside = rows.where(cells, 0.0)
    if not inside.sum().isfinite():
        raise ValueError("a score map has a non-finite cell below the diagonal")
    # Subtract a row's first score first, else rounding leaves a pattern in a row of equal scores.
    first = cells.to(torch.uint8).argmax(-1, keepdim=True).expand(*inside.shape[:-1], 1)
    inside = inside.sub_(inside.gather(-1, first)).where(cells, 0.0)
    counts = cells.sum(-1, keepdim=True).clamp_min(1)
    return inside.sub_(inside.sum(-1, keepdim=True) / counts).where(cells, 0.0)


def pattern_rms(
    maps: Float[Tensor, "layer row key_pos"],
    skip_keys: int = 0,
    where: MapRows | None = None,
) -> Float[Tensor, " layer"]:
    """Return the RMS of maps less each row's mean over the keys skip_keys <= j < i.

    This RMS includes the maps' noise; the amplitude of `measure` does not.

    Example:
        >>> pattern_rms(torch.tensor([[[0.0, 0, 0], [5, 0, 0], [1, 3, 0]]]))
        tensor([0.8165])
    """
    where, key = MapRows.of(maps) if where is None else where, torch.arange(maps.shape[-1])
    cells = (key < where.queries[:, None]) & (key >= skip_keys)
    inside = maps.where(cells, torch.nan)
    centred = inside - inside.nanmean(-1, keepdim=True)
    return centred.square().flatten(-2).nanmean(-1).sqrt()


def diagonal_normalised(
    maps: Float[Tensor, "*batch row key_pos"], where: MapRows | None = None
) -> Float[Tensor, "*batch row key_pos"]:
    """Subtract from each cell the mean of its diagonal (the paper's Figures 4 and 5).

    Means are over the cells that hold a number; other cells, such as masked cells, become NaN.

    Args:
        maps: score maps, or Gram maps.
        where: the rows; of all queries by default.

    Example:
        >>> diagonal_normalised(torch.tensor([[1.0, torch.nan], [5.0, 3.0]]))
        tensor([[-1., nan],
                [ 0.,  1.]])
    """
    where, n = MapRows.of(maps) if where is None else where, maps.shape[-1]
    known, diagonal = maps.isfinite(), where.queries[:, None] - torch.arange(n) + n - 1
    sums, counts = (torch.zeros(*maps.shape[:-2], 2 * n - 1, dtype=maps.dtype) for _ in range(2))
    sums.index_add_(-1, diagonal.flatten(), maps.where(known, 0.0).flatten(-2))
    counts.index_add_(-1, diagonal.flatten(), known.to(maps.dtype).flatten(-2))
    means = sums / counts.clamp_min(1)
    return (maps - means[..., diagonal]).where(known, torch.nan)
