"""Unbiased inner products and 95% jackknife intervals, from folds of the data.

With F folds, <X, Y> is the sum over folds a != b of <X_a, Y_b> over F(F-1): the noise of different
folds is independent, so noise does not count as pattern, and everything linear stays additive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

MIN_FOLDS = 4


@dataclass(frozen=True, kw_only=True, repr=False)
class Interval:
    """An estimate with its 95% interval; all NaN where the estimate is undefined."""

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        """Return the value and the ends of its interval, to three digits."""
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.low > 0 or self.high < 0


UNDEFINED = Interval(value=float("nan"), low=float("nan"), high=float("nan"))


def jackknife(estimates: Float[Tensor, " one_plus_folds"]) -> Interval:
    """Return an estimate with its 95% jackknife interval.

    The half width is t_{F-1}(.975) times the jackknife standard error.

    Args:
        estimates: first the estimate on all folds, then the estimate without each fold.

    Raises:
        ValueError: for fewer than 4 folds.
    """
    from scipy.special import stdtrit

    value, deleted = estimates[0].double(), estimates[1:].double()
    n_folds = len(deleted)
    if n_folds < MIN_FOLDS:
        raise ValueError(f"expected at least {MIN_FOLDS} folds, got {n_folds}")
    variance = (n_folds - 1) / n_folds * (deleted - deleted.mean()).square().sum()
    half = float(stdtrit(n_folds - 1, 0.975)) * variance.sqrt()
    return Interval(value=float(value), low=float(value - half), high=float(value + half))


def standard_error(folds: Float[Tensor, "fold *map"]) -> Float[Tensor, "*map"]:
    """Return the standard error, cell by cell, of the mean of folds of (nearly) equal size."""
    return folds.std(0) / len(folds) ** 0.5


def leave_one_out(folds: Float[Tensor, "fold *map"]) -> Float[Tensor, "one_plus_folds *map"]:
    """Return the mean of all folds, then the mean without each fold."""
    total, n_folds = folds.sum(0, keepdim=True), len(folds)
    return torch.cat([total / n_folds, (total - folds) / (n_folds - 1)])


def cross_products(
    x: Float[Tensor, "x fold cell"], y: Float[Tensor, "y fold cell"]
) -> Float[Tensor, "one_plus_folds x y"]:
    """Return <X, Y> of each pair of maps, on all folds and then without each fold.

    A product is a mean over cells of X*Y, so that <P, P> is a squared RMS.

    Args:
        x: maps as vectors of cells, one per fold.
        y: the maps that each of them is multiplied with.

    Raises:
        ValueError: for fewer than 3 folds.
    """
    n_folds, n_cells = x.shape[1:]
    if n_folds < 3:
        raise ValueError(f"expected at least 3 folds to leave one out, got {n_folds}")
    x, y = x.double(), y.double()
    same = torch.einsum("xfc,yfc->fxy", x, y) / n_cells
    x_total, y_total = x.sum(1), y.sum(1)
    total = x_total @ y_total.T / n_cells
    row = torch.einsum("xfc,yc->fxy", x, y_total) / n_cells
    column = torch.einsum("xc,yfc->fxy", x_total, y) / n_cells
    on_all_folds = (total - same.sum(0)) / (n_folds * (n_folds - 1))
    # Without fold d: drop its row and its column, put back its own cell, drop the other diagonals.
    without = total - row - column + same - (same.sum(0) - same)
    return torch.cat([on_all_folds[None], without / ((n_folds - 1) * (n_folds - 2))])


def signed_root(x: float) -> float:
    """Return sign(x) sqrt(|x|): an RMS from an unbiased square, which noise can make negative."""
    return abs(x) ** 0.5 if x >= 0 else -(abs(x) ** 0.5)


def rms(squares: Float[Tensor, " one_plus_folds"]) -> Interval:
    """Return the RMS with its interval, from estimates of the mean square."""
    square = jackknife(squares)
    return Interval(
        value=signed_root(square.value), low=signed_root(square.low), high=signed_root(square.high)
    )


def share(
    part: Float[Tensor, " one_plus_folds"], whole: Float[Tensor, " one_plus_folds"]
) -> Interval:
    """Return part / whole with its interval; undefined if the whole does not exceed its noise."""
    return jackknife(part / whole) if jackknife(whole).low > 0 else UNDEFINED
