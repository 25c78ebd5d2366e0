"""The cells of a map that patterns are defined on, and maps by the distance i - j of their cells.

A block of rows of a pattern is zero outside skip_keys <= j < i. The projection on {a(i) + f(i-j)}
of patterns whose rows have mean 0 follows from their sums over each distance: with a eliminated, f
solves S f = b, b being these sums; S is singular for a constant f alone, of which a minimum-norm
solution has nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.analyses.jackknife import MIN_FOLDS, fold_weights, standard_error
from nope_probe.maps.centred import kept_cells

EDGE = 0.05


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


@dataclass(frozen=True, kw_only=True)
class OffsetProfile:
    """f(tau), the mean of a map over the cells with i - j = tau, for tau = 1, 2, ...

    Attributes:
        value, low, high: the profile and its 95% jackknife interval, nats.
    """

    value: Float[Tensor, "*batch offset"]
    low: Float[Tensor, "*batch offset"]
    high: Float[Tensor, "*batch offset"]


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
) -> OffsetProfile:
    """Return the offset profile of fold maps, with its interval at each offset.

    Raises:
        ValueError: for fewer than 4 folds.
    """
    return profile_of_means(offset_means(folds.double(), skip_keys), counts=counts)


def profile_of_means(
    means: Float[Tensor, "fold *batch offset"], *, counts: Int[Tensor, " fold"] | None = None
) -> OffsetProfile:
    """Return the offset profile, with its interval, from that of each fold.

    Raises:
        ValueError: for fewer than 4 folds.
    """
    from scipy.special import stdtrit

    n_folds = len(means)
    if n_folds < MIN_FOLDS:
        raise ValueError(f"expected at least {MIN_FOLDS} folds, got {n_folds}")
    weights = fold_weights(n_folds, counts)
    value = torch.einsum("f,f...->...", weights, means)
    # Of a mean over sequences, the jackknife's standard error is that of the fold means.
    quantile = float(stdtrit(float(1 / weights.square().sum()) - 1, 0.975))
    half = quantile * standard_error(means, counts)
    return OffsetProfile(value=value, low=value - half, high=value + half)
