"""Patterns a block of rows at a time, their cells by the distance i - j, and what is rounding.

A block of rows of a pattern is zero outside skip_keys <= j < i. The projection on {a(i) + f(i-j)}
of patterns whose rows have mean 0 follows from their sums over each distance: with a eliminated, f
solves S f = b, b being these sums; S is singular for a constant f alone, of which a minimum-norm
solution has nothing.

Where all tokens are equal, or a removed component had no effect, a pattern of the last digits is
left. It is the same in every fold, so that no noise hides it: what does not exceed the rounding of
the scores is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.analyses.jackknife import Estimates, Intervals, mean_intervals
from nope_probe.maps.centred import block_cells, centred_rows, kept_cells
from nope_probe.maps.stored_maps import BLOCK_BYTES, LayerFolds, TensorFolds, row_blocks

Folds: TypeAlias = LayerFolds | Float[Tensor, "fold query_pos key_pos"]
EDGE = 0.05  # of the kept keys
# Of the RMS score. Models in float32 leave up to half of it (one token at all of 128 positions).
ROUNDING = 8 * torch.finfo(torch.float32).eps


def as_layer(folds: Folds) -> LayerFolds:
    """Return the fold maps of a layer as ones that are read by rows."""
    return folds if isinstance(folds, LayerFolds) else TensorFolds(folds)


def pattern_rows(
    folds: LayerFolds, skip_keys: int, n_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, Float[Tensor, "fold row key_pos"]]]:
    """Yield the fold patterns of a layer by blocks of rows, each with its first row, in float64."""
    for start, stop in row_blocks(folds.n, folds.n_folds, n_bytes):
        yield start, centred_rows(folds.rows(start, stop).double(), start, skip_keys)


def pattern_distance_sums(
    folds: LayerFolds, skip_keys: int, n_bytes: int = BLOCK_BYTES
) -> Float[Tensor, "fold distance"]:
    """Return the sums of a layer's fold patterns over the cells at i - j = 0, 1, ..., n - 1."""
    sums = torch.zeros(folds.n_folds, folds.n, dtype=torch.float64)
    for start, rows in pattern_rows(folds, skip_keys, n_bytes):
        sums += distance_sums(rows, start, folds.n)
    return sums


class NonRelativeRows:
    """The non-relative parts of a layer's fold patterns.

    Args:
        by_distance: what `pattern_distance_sums` returns.
        skip_keys: how many first keys the patterns leave out.
    """

    def __init__(self, by_distance: Float[Tensor, "fold distance"], skip_keys: int) -> None:
        self.a, self.f = relative_fit(by_distance, skip_keys)
        self.skip_keys = skip_keys

    def of(
        self, patterns: Float[Tensor, "fold row key_pos"], start: int
    ) -> Float[Tensor, "fold row key_pos"]:
        """Return a block of rows of the patterns less their fit, 0 outside the kept cells."""
        stop = start + patterns.shape[-2]
        fit = distance_rows(self.f, start, stop) + self.a[:, start:stop, None]
        return (patterns - fit).where(block_cells(start, stop, self.skip_keys), 0.0)


def mean_squares(
    scores: Float[Tensor, "fold row key_pos"], start: int, skip_keys: int, n_cells: int
) -> Float[Tensor, " fold"]:
    """Return what a block of rows adds to the mean square of scores over skip_keys <= j < i.

    Args:
        scores: fold maps of the queries from `start` on, nats.
        start: the first query.
        skip_keys: how many first keys to leave out.
        n_cells: on how many cells the mean is taken, in all blocks.
    """
    kept = scores.where(block_cells(start, start + scores.shape[1], skip_keys), 0.0)
    return kept.square().sum((1, 2)) / n_cells


def exceeds_rounding(squares: Estimates, score_square: float | Float[Tensor, ""]) -> bool:
    """Return whether the mean square of a pattern exceeds what rounding may leave of it.

    One that is not a number does, so that it is not taken for 0.

    Args:
        squares: the estimates of the mean square, squared nats.
        score_square: the mean square of the scores, squared nats.
    """
    return not bool(squares[0].abs() <= ROUNDING**2 * score_square)


def beyond_rounding(squares: Estimates, score_square: float | Float[Tensor, ""]) -> Estimates:
    """Return the estimates of a mean square, or zeros where they do not exceed rounding."""
    return squares if exceeds_rounding(squares, score_square) else torch.zeros_like(squares)


def edge_keys(n: int, skip_keys: int) -> int:
    """Return the key behind the first 5% of the kept ones, of which there is one at least."""
    return skip_keys + max(1, round(EDGE * (n - skip_keys)))


def cells_by_distance(n: int, skip_keys: int) -> Float[Tensor, " distance"]:
    """Return the number of kept cells at i - j = 0, 1, ..., n - 1; none is at 0.

    Example:
        >>> cells_by_distance(5, 1).tolist()
        [0.0, 3.0, 2.0, 1.0, 0.0]
    """
    counts = (n - skip_keys - torch.arange(n, dtype=torch.float64)).clamp_min(0)
    counts[0] = 0
    return counts


def first_cells_by_distance(n: int, skip_keys: int) -> Float[Tensor, " distance"]:
    """Return the number of kept cells at each distance whose keys are among the first 5%."""
    return cells_by_distance(n, skip_keys) - cells_by_distance(n, edge_keys(n, skip_keys))


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
    # Read with rows that are longer by one, the cells of one distance stand in one column.
    skewed = pad(rows.flatten(-2), (0, n_rows)).unflatten(-1, (n_rows, n_keys + 1)).sum(-2)
    columns = (start - torch.arange(n_keys)) % (n_keys + 1)
    return pad(skewed[..., columns], (0, n - n_keys))


def distance_rows(
    values: Float[Tensor, "*map distance"], start: int, stop: int
) -> Float[Tensor, "*map row key_pos"]:
    """Return a block of rows whose cells j <= i are the values at i - j, and others 0.

    Example:
        >>> distance_rows(torch.tensor([0.0, 1.0, 2.0, 3.0]), 1, 3)
        tensor([[1., 0., 0.],
                [2., 1., 0.]])
    """
    n = values.shape[-1]
    windows = pad(values.flip(-1), (0, stop)).unfold(-1, stop, 1)
    return windows[..., n - 1 - torch.arange(start, stop), :]


def relative_fit(
    by_distance: Float[Tensor, "*map distance"], skip_keys: int
) -> tuple[Float[Tensor, "*map query_pos"], Float[Tensor, "*map distance"]]:
    """Return a and f of the least-squares fit a(i) + f(i-j), f having mean 0.

    Args:
        by_distance: sums of a pattern over i - j = 0, 1, ...; its rows have mean 0.
        skip_keys: how many first keys the pattern leaves out.
    """
    n = by_distance.shape[-1]
    longest, factor = n - 1 - skip_keys, _factor(n - 1 - skip_keys).to(by_distance.dtype)
    target = by_distance[..., 1 : longest + 1]
    flat = torch.cholesky_solve(target.reshape(-1, longest).T, factor).T
    f = pad(flat.reshape(target.shape), (1, skip_keys))
    keys = torch.arange(1, longest + 1, dtype=f.dtype)
    a = pad(-f[..., 1 : longest + 1].cumsum(-1) / keys, (1 + skip_keys, 0))
    return a, f


@lru_cache(maxsize=2)
def _factor(longest: int) -> Float[Tensor, "distance distance2"]:
    """Return the Cholesky factor of S + 1, S being the equations for f at distances 1, 2, ...

    S_tt' = [t = t'] (longest + 1 - t) - sum of 1/k over k from max(t, t') to `longest`: a row of k
    keys has the distances 1 to k once each.
    """
    keys = torch.arange(1, longest + 1, dtype=torch.float64)
    tails = (1 / keys).flip(0).cumsum(0).flip(0)
    equations = 1 - torch.minimum(tails[:, None], tails[None])  # tails fall
    equations.diagonal().add_(longest + 1 - keys)
    return torch.linalg.cholesky(equations)


def offset_means(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch offset"]:
    """Return the mean of maps over skip_keys <= j < i at each distance i - j, from 1 on.

    Example:
        >>> offset_means(torch.tensor([[0., 0, 0], [5, 0, 0], [1, 3, 0]]))
        tensor([4., 1.])
    """
    n = maps.shape[-1]
    cells = kept_cells(n, skip_keys)
    position = torch.arange(n)
    offset = (position[:, None] - position[None, :])[cells] - 1
    n_offsets = n - 1 - skip_keys
    sums = torch.zeros(*maps.shape[:-2], n_offsets, dtype=maps.dtype)
    sums.index_add_(-1, offset, maps[..., cells])
    return sums / torch.bincount(offset, minlength=n_offsets).to(maps.dtype)


def offset_profile(
    folds: Float[Tensor, "fold *batch query_pos key_pos"],
    skip_keys: int = 0,
    *,
    counts: Int[Tensor, " fold"] | None = None,
) -> Intervals:
    """Return f(tau), the mean of a map at i - j = tau, for tau = 1, 2, ..., with its interval.

    Args:
        folds: fold maps, nats.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
    """
    return mean_intervals(offset_means(folds.double(), skip_keys), counts)
