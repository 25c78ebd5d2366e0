"""Maps less a mean of their own: each row's (the pattern), or each diagonal's.

Patterns are defined on the cells skip_keys <= j < i.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Rows: TypeAlias = Float[Tensor, "*map row key_pos"]


def kept_cells(n: int, skip_keys: int = 0) -> Bool[Tensor, "query_pos key_pos"]:
    """Return the cells on which patterns are defined: skip_keys <= j < i.

    Raises:
        ValueError: if no row has two of them.
    """
    n_kept_cells(n, skip_keys)
    return block_cells(0, n, skip_keys)


def n_kept_cells(n: int, skip_keys: int) -> int:
    """Return on how many cells patterns are defined.

    Raises:
        ValueError: if no row has two of them.

    Example:
        >>> n_kept_cells(5, 1), int(kept_cells(5, 1).sum())
        (6, 6)
    """
    if not 0 <= skip_keys <= n - 3:
        raise ValueError(
            f"expected from 0 to {n - 3} skipped keys at {n} positions, got {skip_keys}"
        )
    return (n - skip_keys) * (n - skip_keys - 1) // 2


def block_cells(start: int, stop: int, skip_keys: int) -> Bool[Tensor, "row key_pos"]:
    """Return the cells skip_keys <= j < i of a block of rows, with the keys before `stop`."""
    key = torch.arange(stop)
    return (key < torch.arange(start, stop)[:, None]) & (key >= skip_keys)


def row_centred(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Subtract from each row its mean over skip_keys <= j < i: the pattern in a score map.

    Other cells become NaN.

    Raises:
        ValueError: for a non-finite cell among j < i.

    Example:
        >>> row_centred(torch.tensor([[0., 0, 0], [5, 0, 0], [1, 3, 0]]))
        tensor([[nan, nan, nan],
                [ 0., nan, nan],
                [-1.,  1., nan]])
    """
    cells = kept_cells(maps.shape[-1], skip_keys)
    return centred_rows(maps, 0, skip_keys).where(cells, torch.nan)


def centred_rows(rows: Rows, start: int, skip_keys: int) -> Rows:
    """Return a block of rows of patterns: less their means over skip_keys <= j < i, 0 elsewhere.

    Args:
        rows: scores of the queries from `start` on, with the keys up to the last of them.
        start: the first query.
        skip_keys: how many first keys to leave out.

    Raises:
        ValueError: for a non-finite cell among j < i.
    """
    cells = block_cells(start, start + rows.shape[-2], skip_keys)
    inside = rows.where(cells, 0.0)
    if not inside.sum().isfinite():
        raise ValueError("a score map has a non-finite cell below the diagonal")
    if skip_keys < inside.shape[-1]:
        # Less a key of its own first: rounding would leave a pattern in a row of equal scores.
        inside = inside.sub_(inside[..., skip_keys, None].clone()).where(cells, 0.0)
    counts = cells.sum(-1, keepdim=True).clamp_min(1)
    return inside.sub_(inside.sum(-1, keepdim=True) / counts).where(cells, 0.0)


def pattern_rms(
    maps: Float[Tensor, "layer query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, " layer"]:
    """Return the RMS of maps less each row's mean over the keys skip_keys <= j < i.

    It holds the maps' noise too, which the amplitude of `measure` does not.

    Example:
        >>> pattern_rms(torch.tensor([[[0.0, 0, 0], [5, 0, 0], [1, 3, 0]]]))
        tensor([0.8165])
    """
    cells = torch.ones(maps.shape[-2:], dtype=torch.bool).tril(-1)
    cells[:, :skip_keys] = False
    inside = maps.where(cells, torch.nan)
    centred = inside - inside.nanmean(-1, keepdim=True)
    return centred.square().flatten(-2).nanmean(-1).sqrt()


def diagonal_normalised(
    maps: Float[Tensor, "*batch query_pos key_pos"],
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Subtract from each cell the mean of its diagonal (the paper's Figures 4 and 5).

    Means are over the cells that hold a number; the others, such as masked ones, become NaN.

    Example:
        >>> diagonal_normalised(torch.tensor([[1.0, torch.nan], [5.0, 3.0]]))
        tensor([[-1., nan],
                [ 0.,  1.]])
    """
    n, position = maps.shape[-1], torch.arange(maps.shape[-1])
    known, diagonal = maps.isfinite(), position[:, None] - position[None, :] + n - 1
    sums, counts = (torch.zeros(*maps.shape[:-2], 2 * n - 1, dtype=maps.dtype) for _ in range(2))
    sums.index_add_(-1, diagonal.flatten(), maps.where(known, 0.0).flatten(-2))
    counts.index_add_(-1, diagonal.flatten(), known.to(maps.dtype).flatten(-2))
    means = sums / counts.clamp_min(1)
    return (maps - means[..., diagonal]).where(known, torch.nan)
