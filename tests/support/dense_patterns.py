"""Leads and patterns by a loop over rows, their products pair by pair of folds, and estimates."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.maps.estimates import Estimates, fold_weights


def other_keys(
    queries: Int[Tensor, " row"], n: int, skip: int, window: int | None = None
) -> Bool[Tensor, "row key_pos"]:
    """Return the cells of the keys before each query that do not count as first, in a window."""
    distance = queries[:, None] - torch.arange(n)
    return (distance > 0) & (distance < (window or n)) & (torch.arange(n) >= skip)


def patterns(
    maps: Float[Tensor, "*map row key_pos"], kept: Bool[Tensor, "row key_pos"]
) -> Float[Tensor, "*map cell"]:
    """Return the kept cells of maps, less the mean of their rows."""
    rows = [maps[..., i, cells] for i, cells in enumerate(kept) if cells.any()]
    return torch.cat([row - row.mean(-1, keepdim=True) for row in rows], -1)


def leads(
    maps: Float[Tensor, "*map row key_pos"], kept: Bool[Tensor, "row key_pos"], skip: int
) -> dict[int, Float[Tensor, "*map"]]:
    """Return the leads of the rows that see key 0 and 8 other keys, nats."""
    return {
        row: maps[..., row, :skip].mean(-1) - maps[..., row, cells].mean(-1)
        for row, cells in enumerate(kept)
        if skip and cells.sum() >= 8 and maps[..., row, 0].isfinite().all()
    }


def fold_products(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return <X, Y> of maps [map, fold, cell], on all folds and then without each fold."""
    n_folds, x, y = x.shape[1], x.double(), y.double()
    sizes = torch.ones(n_folds).double() if weights is None else weights
    products = torch.einsum("xac,ybc->abxy", x, y) / x.shape[2]
    pairs = sizes[:, None] * sizes * (1 - torch.eye(n_folds).double())
    kept = [torch.arange(n_folds) != out for out in (-1, *range(n_folds))]
    used = [pairs * fold[:, None] * fold for fold in kept]
    return torch.stack([torch.einsum("ab,abxy->xy", pair / pair.sum(), products) for pair in used])


def estimates(
    values: Float[Tensor, " one_plus_folds"], counts: Int[Tensor, " fold"] | None = None
) -> Estimates:
    """Return estimates on all folds and without each fold, of folds of these sizes."""
    return Estimates(values=values, weights=fold_weights(len(values) - 1, counts))
