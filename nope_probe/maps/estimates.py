"""Estimates from folds of the data: a number on all folds, then without each fold in turn.

With F folds of equal size, <X, Y> is the sum over folds a != b of <X_a, Y_b> over F(F-1). Noise
does not count as pattern, because the noise of different folds is independent. Where something was
estimated on the other texts of each half (even folds, odd folds), the folds of a half share its
error, and the sum is over pairs of an even and an odd fold. Linear quantities stay additive. Folds
of unequal size (a document stays in one fold) are weighted by their sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps.folds import halves_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimates:
    """Estimates of one number: on all folds, then without each fold.

    Sums, differences and ratios are taken estimate by estimate.

    Attributes:
        values: the estimates, in the number's unit.
        weights: the share of all sequences that each fold holds.
    """

    values: Float[Tensor, " one_plus_folds"]
    weights: Float[Tensor, " fold"]

    @classmethod
    def of_means(
        cls, folds: Float[Tensor, " fold"], weights: Float[Tensor, " fold"] | None = None
    ) -> Estimates:
        """Return the estimates of a mean over sequences, from the means of folds."""
        weights = fold_weights(len(folds)) if weights is None else weights
        return cls(values=leave_one_out(folds, weights), weights=weights)

    @classmethod
    def of_square(
        cls,
        gram: Float[Tensor, "fold fold2"],
        n_cells: int,
        weights: Float[Tensor, " fold"],
        across_halves: bool = False,
    ) -> Estimates:
        """Return the estimates of a mean square from inner products; see `cross_products`."""
        values = cross_products(gram[None, :, None], n_cells, weights, across_halves)
        return cls(values=values[:, 0, 0], weights=weights)

    @classmethod
    def without_bias(
        cls, values: Float[Tensor, " mean"], weights: Float[Tensor, " fold"]
    ) -> Estimates:
        """Return the estimates of a function of a mean, without the bias of order 1/N.

        A function of the mean of N sequences is off by about b / N on average, if it is not
        linear. Without a fold the mean has fewer sequences, so the bias shows (the delete-m
        jackknife; Busing, Meijer and van der Leeden 1999). A linear function stays as it is.

        Args:
            values: the function of each mean of `weights_of_means`.
            weights: the share of all sequences that each fold holds.
        """
        n_folds = len(weights)
        whole, without, pairs = values.split([1, n_folds, n_folds * (n_folds - 1) // 2])
        first, second = torch.triu_indices(n_folds, n_folds, 1)
        without_both = values.new_zeros(n_folds, n_folds)
        without_both[first, second] = without_both[second, first] = pairs
        left = 1 - weights / (1 - weights[:, None])  # share that a second fold leaves
        bias = left * (without_both - without[:, None])
        bias = torch.cat(
            ((1 - weights) @ (without - whole)[:, None], bias.fill_diagonal_(0).sum(1))
        )
        return cls(values=values[: n_folds + 1] - bias, weights=weights)

    def with_values(self, values: Float[Tensor, " one_plus_folds"]) -> Estimates:
        """Return estimates of another number from the same folds."""
        return replace(self, values=values)

    def __add__(self, other: Estimates) -> Estimates:
        return self.with_values(self.values + other.values)

    def __sub__(self, other: Estimates) -> Estimates:
        return self.with_values(self.values - other.values)

    def __mul__(self, factor: float) -> Estimates:
        return self.with_values(self.values * factor)

    __rmul__ = __mul__

    def __truediv__(self, other: Estimates) -> Estimates:
        return self.with_values(self.values / other.values)


def fold_weights(
    n_folds: int, counts: Int[Tensor, " fold"] | None = None
) -> Float[Tensor, " fold"]:
    """Return the share of all sequences that each fold holds; equal shares by default."""
    sizes = torch.ones(n_folds) if counts is None else counts
    return sizes.double() / sizes.sum()


def leave_one_out(
    folds: Float[Tensor, "fold *map"], weights: Float[Tensor, " fold"]
) -> Float[Tensor, "one_plus_folds *map"]:
    """Return the mean over all sequences, then the mean without each fold.

    Args:
        folds: fold means.
        weights: the share of all sequences that each fold holds.
    """
    weights = weights.to(folds.dtype).view(-1, *[1] * (folds.ndim - 1))
    weighted = weights * folds
    total = weighted.sum(0, keepdim=True)
    return torch.cat([total, (total - weighted) / (1 - weights)])


def weights_of_means(weights: Float[Tensor, " fold"]) -> Float[Tensor, "mean fold"]:
    """Return the weight of each fold in the means that `Estimates.without_bias` takes.

    The means are over all folds, then without each fold, then without each pair of folds.

    Args:
        weights: the share of all sequences that each fold holds.

    Example:
        >>> weights_of_means(torch.tensor([0.5, 0.25, 0.25]))[[0, 1, 4]].tolist()
        [[0.5, 0.25, 0.25], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]
    """
    n_folds = len(weights)
    one = torch.eye(n_folds, dtype=torch.bool)
    first, second = torch.triu_indices(n_folds, n_folds, 1)
    gone = torch.cat((one.new_zeros(1, n_folds), one, one[first] | one[second]))
    kept = weights.expand(len(gone), -1).masked_fill(gone, 0)
    return kept / kept.sum(1, keepdim=True)


def fold_gram(x: Float[Tensor, "x fold *cell"]) -> Float[Tensor, "x fold y fold2"]:
    """Return the sums over cells of the products of fold maps; those of blocks of cells add up.

    Maps need not be in memory at once, and a cell that is 0 in all maps adds nothing.
    """
    flat = x.flatten(0, 1).flatten(1)
    return (flat @ flat.T).view(*x.shape[:2], *x.shape[:2])


def cross_products(
    sums: Float[Tensor, "x fold y fold2"],
    n_cells: int,
    weights: Float[Tensor, " fold"],
    across_halves: bool = False,
) -> Float[Tensor, "one_plus_folds x y"]:
    """Return <X, Y> of every pair of maps, on all folds and then without each fold.

    A product is a mean over cells of X*Y, so <P, P> is a squared RMS. The pair of folds a and b
    has the weight n_a n_b: without noise, <X, Y> is the product of the means over all sequences.

    Args:
        sums: of the products of fold maps; see `fold_gram`.
        n_cells: the number of cells in a product's mean.
        weights: the share of all sequences that each fold holds.
        across_halves: whether only an even and an odd fold are independent, not any two folds.

    Example:
        >>> maps = torch.randn(2, 4, 7)
        >>> cross_products(fold_gram(maps), 7, fold_weights(4)).shape
        torch.Size([5, 2, 2])
    """
    fold = torch.arange(sums.shape[1])
    group = halves_of(fold) if across_halves else fold
    pairs = weights[:, None] * weights * (group[:, None] != group)  # 0 where noise is shared
    products = sums * pairs[:, None] / n_cells
    # Without a fold, its row and its column are left out; they share no cell.
    of_fold = products.sum(3).transpose(0, 1) + products.sum(1).permute(2, 0, 1)
    total, of_pairs = of_fold.sum(0) / 2, pairs.sum() - 2 * pairs.sum(1)
    without = (total - of_fold) / of_pairs[:, None, None]
    return torch.cat([(total / pairs.sum())[None], without])
