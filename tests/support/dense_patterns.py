"""Measures of whole patterns, as the definitions say: oracles of those taken by blocks of rows."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.pattern import LAG, MIN_KEYS, spearman_with_order
from nope_probe.maps.centred import KeptCells, first_visible_keys
from nope_probe.maps.estimates import Estimates, fold_weights


def estimates(
    values: Float[Tensor, " one_plus_folds"], counts: Int[Tensor, " fold"] | None = None
) -> Estimates:
    """Return estimates on all folds and without each fold, of folds of these sizes."""
    return Estimates(values=values, weights=fold_weights(len(values) - 1, counts))


def locality(patterns: Tensor, skip_keys: int = 0) -> Tensor:
    """Return the mean Spearman correlation with j over rows of 8 kept keys or more."""
    rows = [
        spearman_with_order(patterns[..., query, skip_keys:query])
        for query in range(skip_keys + MIN_KEYS, patterns.shape[-1])
    ]
    if not rows:
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    return torch.stack(rows).mean(0)


def monotonicity(patterns: Tensor, lag: int = LAG, skip_keys: int = 0) -> Tensor:
    """Return the share of pairs of kept keys with P[i, j+lag] > P[i, j]; a tie counts as half."""
    pairs = [
        row[..., lag:] - row[..., :-lag]
        for query in range(skip_keys + lag + 1, patterns.shape[-1])
        for row in [patterns[..., query, skip_keys:query]]
    ]
    if not pairs:
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    return (torch.cat(pairs, -1).sign().mean(-1) + 1) / 2


def edge_contrast(maps: Tensor, skip_keys: int = 0) -> Tensor:
    """Return the mean over the first 5% of kept keys (one at least) less that over other keys."""
    first = first_visible_keys(maps).reshape(-1, maps.shape[-1]).amax(0)
    kept = KeptCells.of(first, skip_keys)
    cells = kept.rows(0, kept.n)
    first = cells.clone()
    first[:, kept.edge :] = False
    return maps[..., first].mean(-1) - maps[..., cells & ~first].mean(-1)
