"""Patterns a block of rows at a time: by distance, by query, and beyond rounding.

A block of rows of a pattern is zero outside the kept cells. The rows have mean 0, so the projection
on {a(i) + f(i-j)} follows from the pattern's sums over each distance. With a eliminated, f solves
S f = b, where b holds these sums. S is singular for a constant f alone, and a minimum-norm solution
has no constant part.

Where all tokens are equal, or a removed component had no effect, rounding errors remain as a
pattern. They are identical in all folds, so they look like signal. A pattern that does not exceed
the rounding of the scores is therefore set to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.maps import ALL_ROWS
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import Pattern
from nope_probe.maps.rows import KeptCells

# Share of the RMS score. Models in float32 leave up to half of this (128 equal tokens).
ROUNDING = 8 * torch.finfo(torch.float32).eps
UNSEEN = torch.finfo(torch.float32).eps  # nats: of this, attention in float32 sees nothing
FINE_OFFSETS = 64  # up to this distance, a bin is one distance


def sums_by_distance(
    pattern: Pattern, of: Literal["scores", "pattern"] = "pattern"
) -> Float[Tensor, "fold distance"]:
    """Return the sums of fold scores or patterns over the cells at i - j = 0, 1, ..., n - 1."""
    sums = torch.zeros(pattern.n_folds, pattern.maps.n, dtype=torch.float64)
    for start, scores, rows in pattern.blocks():
        if of == "scores":
            rows = scores.where(pattern.cells.rows(start, start + scores.shape[1]), 0.0)
        sums += distance_sums(rows, start, pattern.maps.n)
    return sums


class PatternSums:
    """Inner products of patterns, and of their parts not by distance, added up over blocks of rows.

    A pattern has rows of mean 0, so its product with the projection of another pattern on
    a(i) + f(i - j) needs only f and the pattern's sums over each distance.

    Args:
        cells: the kept cells.
    """

    def __init__(self, cells: KeptCells) -> None:
        self.cells, self.gram, self.by_distance = cells, torch.zeros(()), torch.zeros(())

    def add(self, rows: Float[Tensor, "map row key_pos"], queries: Int[Tensor, " row"]) -> None:
        """Add rows of patterns, 0 outside the kept cells, with the keys up to the last query."""
        flat = rows.flatten(1)
        self.gram = self.gram + flat @ flat.T
        ends = (queries.diff() > 1).nonzero().flatten() + 1
        runs = zip(rows.tensor_split(ends, 1), queries.tensor_split(ends), strict=True)
        for run, (start, last) in ((run, of_run[[0, -1]].tolist()) for run, of_run in runs):
            sums = distance_sums(run[..., : last + 1], start, self.cells.n)
            self.by_distance = self.by_distance + sums

    @property
    def grams(self) -> tuple[Float[Tensor, "map map2"], Float[Tensor, "map map2"]]:
        """The inner products of patterns, and of their rests (not by distance), over cells."""
        _, f = relative_fit(self.by_distance, self.cells)
        return self.gram, self.gram - f @ self.by_distance.T


def not_by_distance(pattern: Pattern) -> Float[Tensor, "fold row key_pos"]:
    """Return what is not by distance in a layer's fold patterns, 0 outside the kept cells."""
    a, f = relative_fit(sums_by_distance(pattern), pattern.cells)
    blocks: list[Tensor] = []
    for start, _, rows in pattern.blocks():
        stop = start + rows.shape[1]
        rest = rows - distance_rows(f, start, stop) - a[:, start:stop, None]
        rest = rest.where(pattern.cells.rows(start, stop), 0.0)
        blocks.append(pad(rest, (0, pattern.maps.n - stop)))
    return torch.cat(blocks, 1)


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


def beyond_rounding(squares: Estimates, score_square: float | Float[Tensor, ""]) -> Estimates:
    """Return the estimates of a pattern's mean square, or zeros within the rounding of scores.

    Where heads cancel in their mean, the mean's scores are rounding errors of the heads' scores. A
    pattern that attention in float32 does not see exceeds nothing either. A NaN exceeds the limit,
    so that it is not taken for 0.

    Args:
        squares: the estimates of the mean square, squared nats.
        score_square: the mean square of the scores, squared nats.
    """
    limit = max(ROUNDING**2 * float(score_square), UNSEEN**2)
    is_rounding = bool(squares.values[0].abs() <= limit)
    return squares.with_values(torch.zeros_like(squares.values)) if is_rounding else squares


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
    if n_rows == 1:  # the blocks of chosen rows
        return pad(rows[..., 0, :].flip(-1), (0, n - n_keys))
    # With rows one cell longer, the cells of a distance are in one column.
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
    if stop - start == 1:
        return values[..., None, :stop].flip(-1)
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
    longest, equations = len(n_rows), _equations(tuple(n_rows.tolist()))
    target = by_distance[..., 1 : longest + 1]
    columns = target.reshape(by_distance[..., 0].numel(), longest).T
    flat = equations.solve(columns).T
    f = pad(flat.reshape(target.shape), (1, cells.n - 1 - longest))
    keys = torch.arange(1, longest + 1, dtype=f.dtype)
    a = pad(-f[..., 1 : longest + 1].cumsum(-1) / keys, (1, 0))[..., cells.n_keys]
    return a, f


@dataclass(frozen=True, kw_only=True, eq=False)
class _Equations:
    """The equations S f = b for f at the distances 1, 2, ..., solved by groups of distances.

    S_tt' = [t = t'] c(t) - sum of 1/k over the rows of k keys, k from max(t, t') on: a row of k
    keys has the distances 1 to k once each, and c(t) rows have the distance t. Distances of the
    same rows form a group. Within a group S is c(t), so f less the group's mean is b less its mean,
    divided by c(t). The means follow from a system that is as large as the number of groups. Every
    distance of a map with all rows is a group, and maps of chosen rows have few groups.

    Attributes:
        group: the group of each distance.
        sizes: how many distances a group has.
        n_rows: how many rows have the distances of a group.
        factor: the Cholesky factor of S + 1 for the groups' means times the roots of their sizes.
    """

    group: Int[Tensor, " distance"]
    sizes: Float[Tensor, " group"]
    n_rows: Float[Tensor, " group"]
    factor: Float[Tensor, "group group2"]

    def solve(self, b: Float[Tensor, "distance map"]) -> Float[Tensor, "distance map"]:
        """Return the solution f of mean 0, in the precision of b."""
        sizes, n_rows = (x.to(b.dtype)[:, None] for x in (self.sizes, self.n_rows))
        sums = b.new_zeros(len(sizes), b.shape[1]).index_add_(0, self.group, b)
        means = torch.cholesky_solve(sums / sizes.sqrt(), self.factor.to(b.dtype)) / sizes.sqrt()
        within = (b - (sums / sizes)[self.group]) / n_rows[self.group]
        return means[self.group] + within


@lru_cache(maxsize=4)
def _equations(n_rows: tuple[int, ...]) -> _Equations:
    """Return the equations for f.

    Args:
        n_rows: how many rows have 1, 2, ... keys.
    """
    rows = torch.tensor(n_rows, dtype=torch.float64)
    last = rows.nonzero().flatten()  # the last distance of each group
    group = torch.searchsorted(last, torch.arange(len(rows)))
    sizes = group.bincount().double()
    keys = torch.arange(1, len(rows) + 1, dtype=torch.float64)
    tails = (rows / keys).flip(0).cumsum(0).flip(0)[last]
    counts = rows.flip(0).cumsum(0).flip(0)[last]
    equations = 1 - torch.minimum(tails[:, None], tails[None])  # tails fall
    equations *= sizes.sqrt()[:, None] * sizes.sqrt()
    equations.diagonal().add_(counts)
    return _Equations(
        group=group, sizes=sizes, n_rows=counts, factor=torch.linalg.cholesky(equations)
    )


def offset_bins(n_offsets: int) -> Int[Tensor, " bin"]:
    """Return the first distance of each bin; the distances of a bin share a mean.

    Every distance has a bin, up to the length at which maps have all rows by default. Of longer
    sequences, every distance up to 64 has a bin, and above that there are eight bins per doubling.

    Args:
        n_offsets: the largest distance.

    Example:
        >>> offset_bins(5).tolist()
        [1, 2, 3, 4, 5]
        >>> offset_bins(4000)[62:70].tolist()
        [63, 64, 65, 71, 77, 84, 92, 100]
    """
    if n_offsets < ALL_ROWS:
        return torch.arange(1, n_offsets + 1)
    n_bins = 8 * ceil(log2(n_offsets / FINE_OFFSETS))
    ends = [round(FINE_OFFSETS * 2 ** (index / 8)) for index in range(n_bins)]
    growing = torch.tensor([end + 1 for end in ends if end < n_offsets])
    return torch.cat((torch.arange(1, FINE_OFFSETS + 1), growing))


def bin_means(
    pattern: Pattern, of: Literal["scores", "pattern"], bins: Int[Tensor, " bin"]
) -> Float[Tensor, "fold bin"]:
    """Return the means of a layer's fold maps over bins of distances, read by blocks of rows.

    The mean is NaN in bins of which the layer's window hides all cells.

    Args:
        pattern: the layer's pattern.
        of: whether means are of the scores or of the pattern.
        bins: the first distance of each bin.
    """
    sums = sums_by_distance(pattern, of)
    offsets = torch.arange(1, sums.shape[-1] - pattern.cells.skip_keys)
    place = torch.searchsorted(bins, offsets, right=True) - 1
    in_bins, known = (
        torch.zeros(*x.shape[:-1], len(bins), dtype=x.dtype).index_add_(-1, place, x[..., offsets])
        for x in (sums, pattern.cells.by_distance)
    )
    return in_bins / known
