"""Ridge regression from the running sums X'X and X'y, in float64."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

PENALTY = 1e-3


def ridge(
    xx: Float[Tensor, "*batch row row"],
    xy: Float[Tensor, "*batch row target"],
    penalty: float = PENALTY,
) -> Float[Tensor, "*batch row target"]:
    """Return the weights of ridge regressions with a constant, which is not penalised.

    Columns are standardised: the result minimises |y - Xw - b|^2 / n + penalty * sum (s_j w_j)^2,
    where s_j is the standard deviation of column j, so it does not depend on the columns' units.

    Args:
        xx: X'X, where X has a last column of ones: its last cell is n.
        xy: X'y.
        penalty: of a weight on a standardised column.

    Returns:
        w, and b as last row.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
        >>> ridge(x.T @ x, x.T @ (3 * x[:, :1] + 5), penalty=0.0).flatten().round(decimals=3)
        tensor([3., 5.], dtype=torch.float64)
    """
    xx, xy = xx.double(), xy.double()
    n = xx[..., -1:, -1:]
    mean_x, mean_y = xx[..., :-1, -1:] / n, xy[..., -1:, :] / n
    cov_xx = xx[..., :-1, :-1] / n - mean_x * mean_x.mT
    cov_xy = xy[..., :-1, :] / n - mean_x * mean_y
    variance = cov_xx.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    # A constant column has no variance to standardise by; its weight is 0 whatever is added here.
    added = torch.where(variance > 0, penalty * variance, 1.0)
    w = torch.linalg.solve(cov_xx + torch.diag_embed(added), cov_xy)
    return torch.cat([w, mean_y - mean_x.mT @ w], -2)
