"""The projection of patterns on {a(i) + f(i-j)}, from their sums over each distance.

Patterns whose rows have mean 0 are given by blocks of rows, zero outside skip_keys <= j < i. With a
eliminated, f solves S f = b, b being the sums over each distance; S is singular for a constant f
alone, of which a minimum-norm solution has nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


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
