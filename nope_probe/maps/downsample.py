"""Maps pooled to a size that can be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Maps whose cells are means over square blocks of positions.

    Attributes:
        values: nats (or what the maps held); NaN where a block holds no number.
        block: positions per block and axis; 1 if nothing was pooled.
    """

    values: Float[np.ndarray, "layer query_block key_block"]
    block: int


def pool(maps: Float[np.ndarray, "layer query_pos key_pos"], max_positions: int) -> Pooled:
    """Return the means of square blocks of cells, so that no axis is longer than max_positions.

    A block's mean leaves out cells without a number, such as those above the diagonal. The last
    block may be smaller.

    Raises:
        ValueError: if max_positions is below 1.
    """
    if max_positions < 1:
        raise ValueError(f"expected at least 1 position, got {max_positions}")
    block = -(-maps.shape[-1] // max_positions)
    if block == 1:
        return Pooled(values=maps.astype(np.float32), block=1)
    means = np.stack([_block_means(each, block) for each in maps])
    return Pooled(values=means.astype(np.float32), block=block)


def _block_means(
    cells: Float[np.ndarray, "query_pos key_pos"], block: int
) -> Float[np.ndarray, "query_block key_block"]:
    known = np.isfinite(cells)
    sums = _block_sums(np.where(known, cells, np.float32(0)), block)
    counts = _block_sums(known.astype(np.float32), block)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _block_sums(
    cells: Float[np.ndarray, "query_pos key_pos"], block: int
) -> Float[np.ndarray, "query_block key_block"]:
    rows = np.add.reduceat(cells, np.arange(0, cells.shape[0], block), axis=0)
    return np.add.reduceat(rows, np.arange(0, cells.shape[1], block), axis=1)
