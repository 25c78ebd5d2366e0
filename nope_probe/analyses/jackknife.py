"""Unbiased inner products and 95% jackknife intervals, from folds of the data.

With F folds of equal size, <X, Y> is the sum over folds a != b of <X_a, Y_b> over F(F-1). Noise
does not count as pattern, because the noise of different folds is independent. Linear quantities
stay additive. Folds of unequal size (a document stays in one fold) are weighted by their sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, pi
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

MIN_FOLDS = 4
ELLIPSE_POINTS = 721
Estimates: TypeAlias = Float[Tensor, " one_plus_folds"]  # on all folds, then without each fold


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


def fold_weights(
    n_folds: int, counts: Int[Tensor, " fold"] | None = None
) -> Float[Tensor, " fold"]:
    """Return the share of all sequences that each fold holds; equal shares by default."""
    sizes = torch.ones(n_folds) if counts is None else counts
    return sizes.double() / sizes.sum()


def jackknife(estimates: Estimates, counts: Int[Tensor, " fold"] | None = None) -> Interval:
    """Return an estimate with its 95% jackknife interval.

    The variance is that of the delete-m jackknife for folds of unequal sizes (Busing, Meijer and
    van der Leeden 1999), the usual jackknife for equal folds. The half width is its root times the
    quantile .975 of t with 1 / (sum of squared weights) - 1 degrees of freedom, F - 1 for equal
    folds. A large fold lowers this number, because most of the variance then comes from few folds.

    Args:
        estimates: first the estimate on all folds, then the estimate without each fold.
        counts: sequences per fold; all the same by default.

    Raises:
        ValueError: for fewer than 4 folds.
    """
    value, deleted = estimates[0].double(), estimates[1:].double()
    n_folds = len(deleted)
    if n_folds < MIN_FOLDS:
        raise ValueError(f"expected at least {MIN_FOLDS} folds, got {n_folds}")
    weights = fold_weights(n_folds, counts)
    deviations = _deviations(value, deleted, weights)
    variance = (weights / (1 - weights) * deviations.square()).mean()
    half = _quantile(weights) * variance.sqrt()
    return Interval(value=float(value), low=float(value - half), high=float(value + half))


def _deviations(
    value: Float[Tensor, ""], deleted: Float[Tensor, " fold"], weights: Float[Tensor, " fold"]
) -> Float[Tensor, " fold"]:
    """Return the jackknife's pseudovalues less their mean."""
    pseudo = (value - (1 - weights) * deleted) / weights
    return pseudo - (weights * pseudo).sum()


def _quantile(weights: Float[Tensor, " fold"]) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(float(1 / weights.square().sum()) - 1, 0.975))


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Means over all sequences, cell by cell, with their 95% intervals; NaN for a single fold."""

    value: Float[Tensor, "*map"]
    low: Float[Tensor, "*map"]
    high: Float[Tensor, "*map"]


def mean_intervals(
    folds: Float[Tensor, "fold *map"], counts: Int[Tensor, " fold"] | None = None
) -> Intervals:
    """Return the mean over all sequences with its 95% jackknife interval, cell by cell.

    Args:
        folds: fold means.
        counts: sequences per fold; all the same by default.
    """
    folds, weights = folds.double(), fold_weights(len(folds), counts)
    value = torch.einsum("f,f...->...", weights, folds)
    # For a mean over sequences, the jackknife's standard error equals that of the fold means.
    half = _quantile(weights) * standard_error(folds, counts)
    return Intervals(value=value, low=value - half, high=value + half)


def standard_error(
    folds: Float[Tensor, "fold *map"], counts: Int[Tensor, " fold"] | None = None
) -> Float[Tensor, "*map"]:
    """Return the standard error, cell by cell, of the mean over all sequences.

    Args:
        folds: fold means.
        counts: sequences per fold; all the same by default.
    """
    weights = fold_weights(len(folds), counts).to(folds.dtype)
    mean = torch.einsum("f,f...->...", weights, folds)
    spread = torch.einsum("f,f...->...", weights / (1 - weights), (folds - mean).square())
    return (spread / len(folds)).sqrt()


def leave_one_out(
    folds: Float[Tensor, "fold *map"], counts: Int[Tensor, " fold"] | None = None
) -> Float[Tensor, "one_plus_folds *map"]:
    """Return the mean over all sequences, then the mean without each fold.

    Args:
        folds: fold means.
        counts: sequences per fold; all the same by default.
    """
    weights = fold_weights(len(folds), counts).to(folds.dtype)
    weights = weights.view(-1, *[1] * (folds.ndim - 1))
    weighted = weights * folds
    total = weighted.sum(0, keepdim=True)
    return torch.cat([total, (total - weighted) / (1 - weights)])


def cross_products(
    x: Float[Tensor, "x fold cell"],
    y: Float[Tensor, "y fold cell"],
    counts: Int[Tensor, " fold"] | None = None,
) -> Float[Tensor, "one_plus_folds x y"]:
    """Return <X, Y> of every pair of maps, on all folds and then without each fold.

    A product is a mean over cells of X*Y, so <P, P> is a squared RMS. The pair of folds a and b has
    the weight n_a n_b: without noise, <X, Y> is the product of the means over all sequences.

    Args:
        x: fold means of maps as vectors of cells.
        y: the maps that x is multiplied with.
        counts: sequences per fold; all the same by default.

    Raises:
        ValueError: for fewer than 3 folds.
    """
    sums = ProductSums()
    sums.add(x.double(), y.double())
    return sums.cross_products(x.shape[2], counts)


class ProductSums:
    """Sums over cells of the products of fold maps, to which blocks of cells are added.

    The sums do not depend on the cut into blocks, so maps need not be in memory at once. A cell
    that is 0 in all maps adds nothing.

    Example:
        >>> maps, sums = torch.randn(2, 4, 7), ProductSums()
        >>> for block in maps.double().split(3, dim=2):
        ...     sums.add(block, block)
        >>> torch.allclose(sums.cross_products(7), cross_products(maps, maps))
        True
    """

    def __init__(self, sums: Float[Tensor, "x fold y fold2"] | None = None) -> None:
        self.sums = sums

    def add(
        self, x: Float[Tensor, "x fold *cell"], y: Float[Tensor, "y fold *cell"] | None = None
    ) -> None:
        """Add a block of cells.

        Args:
            x: fold means of maps.
            y: the maps that x is multiplied with; x itself by default.
        """
        left = x.flatten(0, 1).flatten(1)
        right = left if y is None else y.flatten(0, 1).flatten(1)
        sums = (left @ right.T).view(*x.shape[:2], -1, x.shape[1])
        self.sums = sums if self.sums is None else self.sums.add_(sums)

    def cross_products(
        self, n_cells: int, counts: Int[Tensor, " fold"] | None = None
    ) -> Float[Tensor, "one_plus_folds x y"]:
        """Return <X, Y> of every pair of maps, as the function `cross_products` does.

        Args:
            n_cells: the number of cells in a product's mean.
            counts: sequences per fold; all the same by default.

        Raises:
            ValueError: for fewer than 3 folds.
        """
        assert self.sums is not None
        n_folds = self.sums.shape[1]
        if n_folds < 3:
            raise ValueError(f"expected at least 3 folds to leave one out, got {n_folds}")
        weights = fold_weights(n_folds, counts)
        squares = weights.square()
        products = self.sums * weights[:, None, None] * weights / n_cells
        same = products.diagonal(dim1=1, dim2=3).permute(2, 0, 1)
        row, column = products.sum(3).transpose(0, 1), products.sum(1).permute(2, 0, 1)
        total = row.sum(0)
        on_all_folds = (total - same.sum(0)) / (1 - squares.sum())
        # Without fold d: drop its row and column, put its own cell back, drop other diagonals.
        without = total - row - column + same - (same.sum(0) - same)
        pairs = (1 - weights).square() - (squares.sum() - squares)
        return torch.cat([on_all_folds[None], without / pairs[:, None, None]])


def signed_root(x: float) -> float:
    """Return sign(x) sqrt(|x|): the RMS of an unbiased square, which noise can make negative."""
    return abs(x) ** 0.5 if x >= 0 else -(abs(x) ** 0.5)


def rms(squares: Estimates, counts: Int[Tensor, " fold"] | None = None) -> Interval:
    """Return the RMS with its interval, from estimates of the mean square."""
    square = jackknife(squares, counts)
    return Interval(
        value=signed_root(square.value), low=signed_root(square.low), high=signed_root(square.high)
    )


def rms_difference(
    one: Estimates, other: Estimates, counts: Int[Tensor, " fold"] | None = None
) -> Interval:
    """Return RMS one - RMS other with its interval, from paired estimates of their mean squares.

    The jackknife of a root is too narrow near 0, where the root is not smooth. The interval holds
    the differences of the roots over an ellipse of both squares instead. Any weighted sum of the
    squares varies over this ellipse as far as its own jackknife interval. Squares below 0 count as
    0 in the ends of the interval.

    Args:
        one: estimates of a mean square, on all folds and without each fold.
        other: estimates of the mean square that is subtracted, from the same sequences.
        counts: sequences per fold; all the same by default.
    """
    weights = fold_weights(len(one) - 1, counts)
    scale = _quantile(weights) * (weights / (1 - weights) / len(weights)).sqrt()
    x, y = (scale * _deviations(squares[0], squares[1:], weights) for squares in (one, other))
    # A point of the ellipse is the squares' difference, then `one`: equal squares stay equal.
    apart = (x - y).norm()
    along = (x - y) / apart.clamp_min(1e-300)
    shared = x @ along
    angles = torch.linspace(0, 2 * pi, ELLIPSE_POINTS, dtype=torch.float64)
    ones = one[0] + shared * angles.cos() + (x - shared * along).norm() * angles.sin()
    others = ones - (one[0] - other[0]) - apart * angles.cos()
    differences = ones.clamp_min(0).sqrt() - others.clamp_min(0).sqrt()
    value = signed_root(float(one[0])) - signed_root(float(other[0]))
    return Interval(
        value=value,
        low=min(value, float(differences.min())),
        high=max(value, float(differences.max())),
    )


def share(
    part: Estimates, whole: Estimates, counts: Int[Tensor, " fold"] | None = None
) -> Interval:
    """Return part / whole with its interval; undefined if the whole does not exceed its noise."""
    return jackknife(part / whole, counts) if jackknife(whole, counts).low > 0 else UNDEFINED


def rms_ratio(
    whole: Estimates, part: Estimates, counts: Int[Tensor, " fold"] | None = None
) -> Interval:
    """Return the ratio of two RMS with its interval, from estimates of their mean squares.

    The interval is computed on the logarithm, because a ratio is skewed. The ratio is undefined
    where either square does not exceed its noise.
    """
    squares = torch.stack([whole, part])
    if not all(jackknife(square, counts).low > 0 for square in squares) or not (squares > 0).all():
        return UNDEFINED
    log = jackknife((whole / part).log() / 2, counts)
    return Interval(value=exp(log.value), low=exp(log.low), high=exp(log.high))
