"""Patterns a block of rows at a time, their cells by the distance i - j, and their rounding.

A block of rows of a pattern is zero outside the kept cells. The rows have mean 0, so the projection
on {a(i) + f(i-j)} follows from the pattern's sums over each distance. With a eliminated, f solves
S f = b, where b holds these sums. S is singular for a constant f alone, and a minimum-norm solution
has no constant part.

Where all tokens are equal, or a removed component had no effect, rounding errors remain as a
pattern. They are identical in all folds, so they look like signal. A pattern that does not exceed
the rounding of the scores is therefore set to 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, log2
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.analyses.jackknife import Estimates, Intervals, ProductSums, mean_intervals
from nope_probe.maps import ALL_ROWS
from nope_probe.maps.centred import KeptCells, centred_rows
from nope_probe.maps.rows import BLOCK_BYTES, QueryPositions, row_blocks, rows_of
from nope_probe.maps.stored_maps import LayerFolds, TensorFolds

Folds: TypeAlias = LayerFolds | Float[Tensor, "fold row key_pos"]
# Share of the RMS score. Models in float32 leave up to half of this (128 equal tokens).
ROUNDING = 8 * torch.finfo(torch.float32).eps
OffsetBins = Literal["auto", "all"]
FINE_OFFSETS = 64  # up to this distance, every distance has its own bin
QUERY_GROUPS = 64


def as_layer(folds: Folds) -> LayerFolds:
    """Return the fold maps of a layer in the form that is read by rows."""
    return folds if isinstance(folds, LayerFolds) else TensorFolds(folds)


def pattern_rows(
    folds: LayerFolds, cells: KeptCells, n_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, Float[Tensor, "fold row key_pos"]]]:
    """Yield the fold patterns of a layer by blocks of rows, each with its first row, in float64."""
    for start, stop in row_blocks(folds.query_positions, folds.n, folds.n_folds, n_bytes):
        yield start, centred_rows(folds.rows(start, stop).double(), cells.rows(start, stop))


def pattern_distance_sums(
    folds: LayerFolds, cells: KeptCells, n_bytes: int = BLOCK_BYTES
) -> Float[Tensor, "fold distance"]:
    """Return the sums of a layer's fold patterns over the cells at i - j = 0, 1, ..., n - 1."""
    sums = torch.zeros(folds.n_folds, folds.n, dtype=torch.float64)
    for start, rows in pattern_rows(folds, cells, n_bytes):
        sums += distance_sums(rows, start, folds.n)
    return sums


class NonRelativeRows:
    """The non-relative parts of a layer's fold patterns.

    Args:
        by_distance: the result of `pattern_distance_sums`.
        cells: the kept cells.
    """

    def __init__(self, by_distance: Float[Tensor, "fold distance"], cells: KeptCells) -> None:
        self.a, self.f = relative_fit(by_distance, cells)
        self.cells = cells

    def of(
        self, patterns: Float[Tensor, "fold row key_pos"], start: int
    ) -> Float[Tensor, "fold row key_pos"]:
        """Return a block of rows of the patterns less their fit, 0 outside the kept cells."""
        stop = start + patterns.shape[-2]
        fit = distance_rows(self.f, start, stop) + self.a[:, start:stop, None]
        return (patterns - fit).where(self.cells.rows(start, stop), 0.0)


def mean_squares(
    scores: Float[Tensor, "fold row key_pos"], start: int, cells: KeptCells
) -> Float[Tensor, " fold"]:
    """Return a block's part of the mean square of scores over the kept cells.

    Args:
        scores: fold maps of the queries from `start` on, nats.
        start: the first query.
        cells: the kept cells of all blocks.
    """
    kept = scores.where(cells.rows(start, start + scores.shape[1]), 0.0)
    return kept.square().sum((1, 2)) / cells.count


def exceeds_rounding(squares: Estimates, score_square: float | Float[Tensor, ""]) -> bool:
    """Return whether the mean square of a pattern exceeds the limit of rounding errors.

    A NaN exceeds it, so that it is not taken for 0.

    Args:
        squares: the estimates of the mean square, squared nats.
        score_square: the mean square of the scores, squared nats.
    """
    return not bool(squares[0].abs() <= ROUNDING**2 * score_square)


def beyond_rounding(squares: Estimates, score_square: float | Float[Tensor, ""]) -> Estimates:
    """Return the estimates of a mean square, or zeros where they do not exceed rounding."""
    return squares if exceeds_rounding(squares, score_square) else torch.zeros_like(squares)


def distance_sums(
    rows: Float[Tensor, "*map row key_pos"], start: int, n: int
) -> Float[Tensor, "*map distance"]:
    """Return the sums over the cells with i - j = 0, 1, ..., n - 1 in a block of rows.

    Args:
        rows: the queries from `start` on, with the keys up to the last of them; 0 for j > i.
        start: the first query.
        n: how many positions there are.

    Example:
        >>> distance_sums(torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]), 1, 4)
        tensor([7., 5., 3., 0.])
    """
    n_rows, n_keys = rows.shape[-2:]
    # With rows one cell longer, the cells of a distance stand in one column.
    skewed = pad(rows.flatten(-2), (0, n_rows)).unflatten(-1, (n_rows, n_keys + 1)).sum(-2)
    columns = (start - torch.arange(n_keys)) % (n_keys + 1)
    return pad(skewed[..., columns], (0, n - n_keys))


def distance_rows(
    values: Float[Tensor, "*map distance"], start: int, stop: int
) -> Float[Tensor, "*map row key_pos"]:
    """Return a block of rows whose cells j <= i hold the values at i - j; other cells are 0.

    Example:
        >>> distance_rows(torch.tensor([0.0, 1.0, 2.0, 3.0]), 1, 3)
        tensor([[1., 0., 0.],
                [2., 1., 0.]])
    """
    n = values.shape[-1]
    windows = pad(values.flip(-1), (0, stop)).unfold(-1, stop, 1)
    return windows[..., n - 1 - torch.arange(start, stop), :]


def relative_fit(
    by_distance: Float[Tensor, "*map distance"], cells: KeptCells
) -> tuple[Float[Tensor, "*map query_pos"], Float[Tensor, "*map distance"]]:
    """Return a and f of the least-squares fit a(i) + f(i-j), f having mean 0.

    Args:
        by_distance: sums of a pattern over i - j = 0, 1, ...; the pattern's rows have mean 0.
        cells: the kept cells; f is 0 at distances without kept cells.
    """
    n_rows = torch.bincount(cells.n_keys)[1:]  # rows of 1, 2, ... keys
    longest, factor = len(n_rows), _factor(tuple(n_rows.tolist())).to(by_distance.dtype)
    target = by_distance[..., 1 : longest + 1]
    flat = torch.cholesky_solve(target.reshape(-1, longest).T, factor).T
    f = pad(flat.reshape(target.shape), (1, cells.n - 1 - longest))
    keys = torch.arange(1, longest + 1, dtype=f.dtype)
    a = pad(-f[..., 1 : longest + 1].cumsum(-1) / keys, (1, 0))[..., cells.n_keys]
    return a, f


@lru_cache(maxsize=4)
def _factor(n_rows: tuple[int, ...]) -> Float[Tensor, "distance distance2"]:
    """Return the Cholesky factor of S + 1, with S the equations for f at distances 1, 2, ...

    S_tt' = [t = t'] c(t) - sum of 1/k over the rows of k keys, k from max(t, t') on: a row of k
    keys has the distances 1 to k once each, and c(t) rows have the distance t.

    Args:
        n_rows: how many rows have 1, 2, ... keys.
    """
    rows = torch.tensor(n_rows, dtype=torch.float64)
    keys = torch.arange(1, len(rows) + 1, dtype=torch.float64)
    tails = (rows / keys).flip(0).cumsum(0).flip(0)
    equations = 1 - torch.minimum(tails[:, None], tails[None])  # tails fall
    equations.diagonal().add_(rows.flip(0).cumsum(0).flip(0))
    return torch.linalg.cholesky(equations)


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


def offset_means(
    maps: Float[Tensor, "*batch row key_pos"],
    skip_keys: int = 0,
    query_positions: QueryPositions = None,
    bins: Int[Tensor, " bin"] | None = None,
) -> Float[Tensor, "*batch bin"]:
    """Return the mean of maps over skip_keys <= j < i at each distance i - j, from 1 on.

    The mean is NaN at distances whose cells are all hidden by a window, or that no row has.

    Args:
        maps: score maps, or patterns.
        skip_keys: how many first keys to leave out.
        query_positions: the queries of the rows; all by default.
        bins: the first distance of each bin; by default every distance has a bin.

    Example:
        >>> offset_means(torch.tensor([[0., 0, 0], [5, 0, 0], [1, 3, 0]]))
        tensor([4., 1.])
    """
    n_rows, n = maps.shape[-2:]
    queries = rows_of(n_rows, query_positions)
    unhidden = torch.zeros(n_rows, dtype=torch.long)
    cells = KeptCells.of(unhidden, skip_keys, queries, n).mask
    bins = offset_bins(n - 1 - skip_keys, "all") if bins is None else bins
    place = bin_of_offset((queries[:, None] - torch.arange(n))[cells], bins)
    values = maps[..., cells]
    sums, counts = (values.new_zeros(*maps.shape[:-2], len(bins)) for _ in range(2))
    known = ~values.isnan()
    sums.index_add_(-1, place, values.where(known, 0.0))
    counts.index_add_(-1, place, known.to(maps.dtype))
    return sums / counts


def offset_profile(
    folds: Float[Tensor, "fold *batch row key_pos"],
    skip_keys: int = 0,
    *,
    counts: Int[Tensor, " fold"] | None = None,
    query_positions: QueryPositions = None,
    bins: Int[Tensor, " bin"] | None = None,
) -> Intervals:
    """Return f(tau), the mean of a map at i - j = tau, for tau = 1, 2, ..., with its interval.

    Args:
        folds: fold maps, nats.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
        query_positions: the queries of the rows; all by default.
        bins: the first distance of each bin; by default every distance has a bin.
    """
    return mean_intervals(offset_means(folds.double(), skip_keys, query_positions, bins), counts)


def mean_squares_by_query(
    folds: LayerFolds, cells: KeptCells, counts: Int[Tensor, " fold"] | None = None
) -> tuple[Float[Tensor, "one_plus_folds group"], list[tuple[int, int]]]:
    """Return the mean square of a layer's pattern over the keys of groups of queries.

    Products are between different folds, so that noise does not count. Results are on all folds,
    then without each fold.

    Args:
        folds: the layer's fold maps.
        cells: the kept cells.
        counts: sequences per fold; all the same by default.

    Returns:
        Squared nats, and the first and last query of each group: at most 64 groups of equally
        many rows.
    """
    queries = cells.query_positions[cells.n_keys[cells.query_positions] > 1]
    groups = queries.tensor_split(min(QUERY_GROUPS, len(queries)))
    group_of = torch.full((cells.n,), -1)
    for index, group in enumerate(groups):
        group_of[group] = index
    grams = torch.zeros(len(groups), folds.n_folds, folds.n_folds, dtype=torch.float64)
    for start, rows in pattern_rows(folds, cells):
        of_rows = torch.einsum("frk,grk->rfg", rows, rows)
        held = group_of[start : start + len(of_rows)]
        grams.index_add_(0, held[held >= 0], of_rows[held >= 0])
    squares = [
        ProductSums(gram[None, :, None]).cross_products(int(cells.n_keys[group].sum()), counts)
        for gram, group in zip(grams, groups, strict=True)
    ]
    ends = [(int(group[0]), int(group[-1])) for group in groups]
    return torch.stack([square[:, 0, 0] for square in squares], 1), ends
