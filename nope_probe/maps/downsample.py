"""Maps pooled to a size that can be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Maps whose cells are means over square blocks of positions.

    Attributes:
        values: nats (or the maps' own unit); NaN where a block holds no number.
        block: positions per block and axis; 1 if nothing was pooled.
    """

    values: Float[np.ndarray, "layer query_block key_block"]
    block: int


def pool(
    maps: Float[np.ndarray, "layer row key_pos"],
    max_positions: int,
    query_positions: Int[np.ndarray, " row"] | None = None,
) -> Pooled:
    """Return the means of square blocks of cells, so that no axis is longer than max_positions.

    A block's mean leaves out cells without a number, such as those above the diagonal, and queries
    without a row. The last block may be smaller.

    Args:
        maps: maps, in nats or another unit.
        max_positions: how many cells an axis has at most.
        query_positions: the queries of the rows; all by default.

    Raises:
        ValueError: if max_positions is below 1.

    Example:
        >>> two_rows = np.array([[[1.0, 3.0, np.nan, np.nan], [5.0, 7.0, 9.0, 9.0]]])
        >>> pool(two_rows, 2, np.array([1, 3])).values.tolist()
        [[[2.0, nan], [6.0, 9.0]]]
    """
    if max_positions < 1:
        raise ValueError(f"expected at least 1 position, got {max_positions}")
    n_rows, n = maps.shape[-2:]
    block = -(-n // max_positions)
    queries = np.arange(n_rows) if query_positions is None else query_positions
    if block == 1 and len(queries) == n:
        return Pooled(values=maps.astype(np.float32), block=1)
    means = np.stack([_block_means(values, block, queries) for values in maps])
    return Pooled(values=means.astype(np.float32), block=block)


def _block_means(
    cells: Float[np.ndarray, "row key_pos"], block: int, queries: Int[np.ndarray, " row"]
) -> Float[np.ndarray, "query_block key_block"]:
    known = np.isfinite(cells)
    sums = _block_sums(np.where(known, cells, np.float32(0)), block, queries)
    counts = _block_sums(known.astype(np.float32), block, queries)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _block_sums(
    cells: Float[np.ndarray, "row key_pos"], block: int, queries: Int[np.ndarray, " row"]
) -> Float[np.ndarray, "query_block key_block"]:
    n = cells.shape[1]
    filled, starts = np.unique(queries // block, return_index=True)
    sums = np.zeros((-(-n // block), n), cells.dtype)
    sums[filled] = np.add.reduceat(cells, starts, axis=0)
    return np.add.reduceat(sums, np.arange(0, n, block), axis=1)
