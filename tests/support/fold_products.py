"""Inner products over pairs of different folds, pair by pair."""

import torch
from torch import Tensor


def fold_products(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return <X, Y> of maps [map, fold, cell], on all folds and then without each fold."""
    n_folds, x, y = x.shape[1], x.double(), y.double()
    sizes = torch.ones(n_folds).double() if weights is None else weights
    products = torch.einsum("xac,ybc->abxy", x, y) / x.shape[2]
    pairs = sizes[:, None] * sizes * (1 - torch.eye(n_folds).double())
    kept = [torch.arange(n_folds) != out for out in (-1, *range(n_folds))]
    used = [pairs * fold[:, None] * fold for fold in kept]
    return torch.stack([torch.einsum("ab,abxy->xy", pair / pair.sum(), products) for pair in used])
