"""Locality and monotonicity: how a pattern's values are ordered along the keys of each query.

Above 512 positions `measure` takes both on every (n/256)-th query, rounded up: ordering all keys of
all queries would take longer than the model does, and neighbouring queries have similar patterns.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.maps.centred import KeptCells, first_visible_keys

LAG = 8
MIN_KEYS = 8
EXACT_POSITIONS = 512  # up to so many positions, all queries are ordered
ORDERED_QUERIES = 256  # above, about so many
Rows = Float[Tensor, "*map row key_pos"]


def query_stride(n: int) -> int:
    """Return of how many queries one is ordered, at n positions.

    Example:
        >>> [query_stride(n) for n in (64, 512, 513, 1024, 4096)]
        [1, 1, 3, 4, 16]
    """
    return 1 if n <= EXACT_POSITIONS else -(-n // ORDERED_QUERIES)


class TrendSums:
    """Sums of a layer's locality and monotonicity, to which blocks of rows are added.

    Args:
        n_maps: how many patterns there are.
        skip_keys: how many first keys they leave out.
        stride: of how many queries one is taken, the first being 0.
    """

    def __init__(self, n_maps: int, skip_keys: int, stride: int = 1) -> None:
        self.skip_keys, self.stride = skip_keys, stride
        self.n_rows, self.n_pairs = 0, {1: 0, LAG: 0}
        self.correlations = torch.zeros(n_maps, dtype=torch.float64)
        self.signs = {lag: torch.zeros(n_maps, dtype=torch.float64) for lag in self.n_pairs}

    def chosen(self, start: int, stop: int) -> range:
        """Return which of some queries are taken."""
        return range(-(-start // self.stride) * self.stride, stop, self.stride)

    def add(self, row: Float[Tensor, "map key_pos"]) -> None:
        """Add the kept keys before one query."""
        n_keys = row.shape[-1]
        if n_keys >= MIN_KEYS:
            self.correlations += spearman_with_order(row)
            self.n_rows += 1
        for lag in self.signs:
            if n_keys > lag:
                self.signs[lag] += (row[:, lag:] - row[:, :-lag]).sign().sum(-1)
                self.n_pairs[lag] += n_keys - lag

    @property
    def locality(self) -> Float[Tensor, " map"]:
        """The mean Spearman correlation of P[i, j] with j; NaN without rows of 8 keys."""
        return self.correlations / self.n_rows if self.n_rows else self.correlations * torch.nan

    def monotonicity(self, lag: int) -> Float[Tensor, " map"]:
        """Return the share of pairs of keys with P[i, j+lag] > P[i, j]; NaN without pairs."""
        n_pairs = self.n_pairs[lag]
        return (self.signs[lag] / n_pairs + 1) / 2 if n_pairs else self.signs[lag] * torch.nan


def locality(
    patterns: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0, stride: int = 1
) -> Float[Tensor, "*batch"]:
    """Return the Spearman correlation of P[i, j] with j, averaged over rows of 8 keys or more.

    A constant row counts as 0; without rows of 8 keys the mean is NaN.

    Args:
        patterns: patterns, nats.
        skip_keys: how many first keys to leave out.
        stride: between the queries that are taken, the first being 0.
    """
    cells = _kept_cells(patterns, skip_keys)
    rows = [
        spearman_with_order(patterns[..., query, int(cells.first[query]) : query])
        for query in range(0, patterns.shape[-1], stride)
        if cells.n_keys[query] >= MIN_KEYS
    ]
    if not rows:
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    return torch.stack(rows).mean(0)


def spearman_with_order(values: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Return the Spearman correlation of values with their places; 0 if all are equal."""
    order = torch.arange(values.shape[-1], dtype=values.dtype)
    order = order - order.mean()
    places = np.argsort(values.numpy(), -1)  # more than twice as fast as torch's
    ordered = np.take_along_axis(values.numpy(), places, -1)
    if (ordered[..., 1:] > ordered[..., :-1]).all():  # without ties, the usual case
        # The sum of rank times place is the same in the order of ranks; order sums to 0.
        return torch.from_numpy(places).to(values.dtype) @ order / order.square().sum()
    ranks = _ranks(values.contiguous())
    ranks = ranks - ranks.mean(-1, keepdim=True)
    norms = ranks.norm(dim=-1) * order.norm()
    return torch.where(norms > 0, (ranks @ order) / norms.clamp_min(1e-300), 0.0)


def _ranks(values: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch key"]:
    """Return ranks from 0; ties get the mean of the ranks that they span."""
    ordered = values.sort(-1)[0].contiguous()
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to - 1).to(values.dtype) / 2


def monotonicity(
    patterns: Float[Tensor, "*batch query_pos key_pos"], lag: int = LAG, skip_keys: int = 0
) -> Float[Tensor, "*batch"]:
    """Return the share of pairs of kept keys with P[i, j+lag] > P[i, j]; a tie counts as half."""
    cells = _kept_cells(patterns, skip_keys).rows(0, patterns.shape[-1])
    pairs = cells[:, lag:] & cells[:, :-lag]
    if not pairs.any():
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    step = (patterns[..., :, lag:] - patterns[..., :, :-lag])[..., pairs]
    return (step.sign() + 1).mean(-1) / 2


def _kept_cells(patterns: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int) -> KeptCells:
    """Return the cells that all patterns have, of which there may be none."""
    first = first_visible_keys(patterns).reshape(-1, patterns.shape[-1]).amax(0)
    return KeptCells(first=first.clamp_min(skip_keys), skip_keys=skip_keys)
