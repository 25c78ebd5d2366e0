"""Profiles of maps: their means by the distance of key and query, and the strength by query."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps import ALL_ROWS
from nope_probe.maps.estimates import Estimates, ProductSums
from nope_probe.maps.layers import Pattern

OffsetBins = Literal["auto", "all"]
FINE_OFFSETS = 64  # up to this distance, a bin is one distance
QUERY_GROUPS = 64


def offset_bins(n_offsets: int, choice: OffsetBins = "auto") -> Int[Tensor, " bin"]:
    """Return the first distance of each bin; the distances of a bin share a mean.

    Args:
        n_offsets: the largest distance.
        choice: `all` gives every distance a bin. So does `auto` up to the length at which maps
            have all rows by default; for longer sequences it gives every distance up to 64 a bin,
            and above that eight bins per doubling.

    Example:
        >>> offset_bins(5).tolist()
        [1, 2, 3, 4, 5]
        >>> offset_bins(4000)[62:70].tolist()
        [63, 64, 65, 71, 77, 84, 92, 100]
    """
    if choice == "all" or n_offsets < ALL_ROWS:
        return torch.arange(1, n_offsets + 1)
    n_bins = 8 * ceil(log2(n_offsets / FINE_OFFSETS))
    ends = [round(FINE_OFFSETS * 2 ** (index / 8)) for index in range(n_bins)]
    growing = torch.tensor([end + 1 for end in ends if end < n_offsets])
    return torch.cat((torch.arange(1, FINE_OFFSETS + 1), growing))


def bin_of_offset(offsets: Int[Tensor, " offset"], bins: Int[Tensor, " bin"]) -> Tensor:
    """Return the number of the bin that holds each distance."""
    return torch.searchsorted(bins, offsets, right=True) - 1


def bin_means(
    pattern: Pattern,
    distance_sums: Callable[[Pattern], Float[Tensor, "fold distance"]],
    bins: Int[Tensor, " bin"],
) -> Float[Tensor, "fold bin"]:
    """Return the means of a layer's fold maps over bins of distances, read by blocks of rows.

    The mean is NaN in bins of which the layer's window hides all cells.

    Args:
        pattern: the layer's pattern.
        distance_sums: `score_distance_sums`, or `pattern_distance_sums`.
        bins: the first distance of each bin.
    """
    sums = distance_sums(pattern)
    offsets = torch.arange(1, sums.shape[-1] - pattern.cells.skip_keys)
    place = bin_of_offset(offsets, bins)
    in_bins, known = (
        torch.zeros(*x.shape[:-1], len(bins), dtype=x.dtype).index_add_(-1, place, x[..., offsets])
        for x in (sums, pattern.cells.by_distance)
    )
    return in_bins / known


def mean_squares_by_query(pattern: Pattern) -> list[tuple[tuple[int, int], Estimates]]:
    """Return the mean square of a pattern over the keys of groups of queries.

    Products are between different folds, so that noise does not count.

    Returns:
        The first and last query of each group, and its squared nats: at most 64 groups of equally
        many rows.
    """
    cells = pattern.cells
    queries = cells.query_positions[cells.n_keys[cells.query_positions] > 1]
    groups = queries.tensor_split(min(QUERY_GROUPS, len(queries))) if len(queries) else ()
    group_of = torch.full((cells.n,), -1)
    for index, group in enumerate(groups):
        group_of[group] = index
    grams = torch.zeros(len(groups), pattern.n_folds, pattern.n_folds, dtype=torch.float64)
    for block in pattern.blocks():
        of_rows = torch.einsum("frk,grk->rfg", block.rows, block.rows)
        group = group_of[block.start : block.start + len(of_rows)]
        grams.index_add_(0, group[group >= 0], of_rows[group >= 0])
    weights, squares = pattern.maps.weights, []
    for gram, group in zip(grams, groups, strict=True):
        sums, n_cells = ProductSums(gram[None, :, None]), int(cells.n_keys[group].sum())
        squares.append(((int(group[0]), int(group[-1])), sums.product(n_cells, weights)))
    return squares
