"""Locality and monotonicity: the order of a pattern's values along the keys of each query.

For more than 512 rows, `measure` takes both on every (rows/256)-th row, rounded up. Ordering the
keys of all queries would take longer than the model, and neighbouring queries have similar
patterns.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps.centred import KeptCells, first_visible_keys
from nope_probe.maps.rows import QueryPositions, rows_of

LAG = 8
MIN_KEYS = 8
EXACT_ROWS = 512  # up to this number of rows, the keys of all queries are ordered
ORDERED_ROWS = 256  # above it, the keys of about this number of queries are ordered
Rows = Float[Tensor, "*map row key_pos"]


def query_stride(n_rows: int) -> int:
    """Return the stride between rows whose keys are ordered, in a map of n_rows rows.

    Example:
        >>> [query_stride(n) for n in (64, 512, 513, 1024, 4096)]
        [1, 1, 3, 4, 16]
    """
    return 1 if n_rows <= EXACT_ROWS else -(-n_rows // ORDERED_ROWS)


class TrendSums:
    """Sums of a layer's locality and monotonicity, to which blocks of rows are added.

    Args:
        n_maps: how many patterns there are.
        query_positions: the queries of the rows.
    """

    def __init__(self, n_maps: int, query_positions: Int[Tensor, " row"]) -> None:
        self.queries = query_positions[:: query_stride(len(query_positions))].contiguous()
        self.n_rows, self.n_pairs = 0, {1: 0, LAG: 0}
        self.correlations = torch.zeros(n_maps, dtype=torch.float64)
        self.signs = {lag: torch.zeros(n_maps, dtype=torch.float64) for lag in self.n_pairs}

    def chosen(self, start: int, stop: int) -> list[int]:
        """Return the queries from start to stop - 1 whose keys are ordered."""
        first, behind = torch.searchsorted(self.queries, torch.tensor([start, stop])).tolist()
        chosen: list[int] = self.queries[first:behind].tolist()
        return chosen

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
    patterns: Float[Tensor, "*batch row key_pos"],
    skip_keys: int = 0,
    stride: int = 1,
    query_positions: QueryPositions = None,
) -> Float[Tensor, "*batch"]:
    """Return the Spearman correlation of P[i, j] with j, averaged over rows of 8 keys or more.

    A constant row counts as 0; without rows of 8 keys the mean is NaN.

    Args:
        patterns: patterns, nats.
        skip_keys: how many first keys to leave out.
        stride: the stride between the rows used, starting with row 0.
        query_positions: the queries of the rows; all by default.
    """
    cells = _kept_cells(patterns, skip_keys, query_positions)
    rows = [
        spearman_with_order(patterns[..., row, int(cells.first[query]) : query])
        for row, query in list(enumerate(cells.query_positions.tolist()))[::stride]
        if cells.n_keys[query] >= MIN_KEYS
    ]
    if not rows:
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    return torch.stack(rows).mean(0)


def spearman_with_order(values: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """Return the Spearman correlation of values with their places; 0 if all values are equal."""
    order = torch.arange(values.shape[-1], dtype=values.dtype)
    order = order - order.mean()
    places = np.argsort(values.numpy(), -1)  # more than twice as fast as torch's
    ordered = np.take_along_axis(values.numpy(), places, -1)
    if (ordered[..., 1:] > ordered[..., :-1]).all():  # without ties, the usual case
        # Sum rank times place in the order of ranks; `order` sums to 0.
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
    patterns: Float[Tensor, "*batch row key_pos"],
    lag: int = LAG,
    skip_keys: int = 0,
    query_positions: QueryPositions = None,
) -> Float[Tensor, "*batch"]:
    """Return the share of pairs of kept keys with P[i, j+lag] > P[i, j]; a tie counts as half."""
    cells = _kept_cells(patterns, skip_keys, query_positions).mask
    pairs = cells[:, lag:] & cells[:, :-lag]
    if not pairs.any():
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    step = (patterns[..., :, lag:] - patterns[..., :, :-lag])[..., pairs]
    return (step.sign() + 1).mean(-1) / 2


def _kept_cells(
    patterns: Float[Tensor, "*batch row key_pos"], skip_keys: int, query_positions: QueryPositions
) -> KeptCells:
    """Return the cells that all patterns have, perhaps none."""
    n_rows, n = patterns.shape[-2:]
    queries = rows_of(n_rows, query_positions)
    visible = first_visible_keys(patterns, queries).reshape(-1, n_rows).amax(0)
    first = torch.arange(n)
    first[queries] = visible.clamp_min(skip_keys)
    return KeptCells(first=first, query_positions=queries, skip_keys=skip_keys)
