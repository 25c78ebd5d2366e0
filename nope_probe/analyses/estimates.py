"""The estimates that measures make intervals from, added up over blocks of rows of a layer's folds.

Sums over cells, over the cells of a distance and over the first keys are linear in the maps: they
are kept per fold. Only the order of values is not; it is that of the means without each fold.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.conditions import FoldCounts
from nope_probe.analyses.jackknife import ProductSums, leave_one_out
from nope_probe.analyses.pattern_rows import (
    Folds,
    NonRelativeRows,
    as_layer,
    centred_rows,
    n_kept_cells,
    pattern_rows,
)
from nope_probe.analyses.relative import distance_sums
from nope_probe.analyses.rounding import beyond_rounding, mean_squares
from nope_probe.analyses.trends import LAG, TrendSums, query_stride
from nope_probe.hooks.layer_folds import BLOCK_BYTES, LayerFolds, row_blocks

EDGE = 0.05


def measure_estimates(
    folds: Folds,
    skip_keys: int,
    counts: FoldCounts | None = None,
    *,
    n_bytes: int = BLOCK_BYTES,
) -> dict[str, Float[Tensor, " one_plus_folds"]]:
    """Return what `measure` makes intervals from: each on all folds, then without each fold.

    `amplitude_squared` and `non_relative_squared` are unbiased mean squares, in squared nats, and 0
    within the rounding of the scores.

    Args:
        folds: fold means of one layer's scores, nats.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
        n_bytes: of a block of rows.
    """
    layer = as_layer(folds)
    n_cells = n_kept_cells(layer.n, skip_keys)
    score_square = torch.zeros((), dtype=torch.float64)
    scores, patterns = _ScoreSums(layer, skip_keys), _PatternSums(layer, skip_keys)
    trends = TrendSums(1 + layer.n_folds, skip_keys, query_stride(layer.n))
    for start, stop in row_blocks(layer.n, layer.n_folds, n_bytes):
        raw = layer.rows(start, stop).double()
        rows = centred_rows(raw, start, skip_keys)
        scores.add(raw, start)
        score_square += mean_squares(raw, start, skip_keys, n_cells).mean()
        patterns.add(rows, start)
        chosen = trends.chosen(start, stop)
        means = leave_one_out(rows[:, [query - start for query in chosen]], counts)
        for index, query in enumerate(chosen):
            trends.add(means[:, index, skip_keys:query])
    rest, fit = _PatternSums(layer, skip_keys), NonRelativeRows(patterns.by_distance, skip_keys)
    for start, rows in pattern_rows(layer, skip_keys, n_bytes):
        rest.add(fit.of(rows, start), start)
    squares, rest_squares = (
        beyond_rounding(each.products.cross_products(n_cells, counts)[:, 0, 0], score_square)
        for each in (patterns, rest)
    )
    return {
        "amplitude_squared": squares,
        "non_relative_squared": rest_squares,
        "locality": trends.locality,
        "monotonicity": trends.monotonicity(LAG),
        "monotonicity_lag1": trends.monotonicity(1),
        "edge_contrast": leave_one_out(scores.edge_contrast(), counts),
        "edge_contrast_visible": leave_one_out(rest.edge_contrast(), counts)
        * float(rest_squares.any()),
    }


def edge_keys(n: int, skip_keys: int) -> int:
    """Return the key behind the first 5% of the kept ones, of which there is one at least."""
    return skip_keys + max(1, round(EDGE * (n - skip_keys)))


class _PatternSums:
    """Sums over blocks of rows that are 0 outside the kept cells: patterns, or a part of them."""

    def __init__(self, layer: LayerFolds, skip_keys: int) -> None:
        self.n, self.skip_keys, self.products = layer.n, skip_keys, ProductSums()
        self.edge = edge_keys(layer.n, skip_keys)
        self.by_distance = torch.zeros(layer.n_folds, layer.n, dtype=torch.float64)
        self.first = torch.zeros(layer.n_folds, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "fold row key_pos"], start: int) -> None:
        """Add a block of rows, from the query `start` on."""
        self.products.add(rows[None])
        self.by_distance += distance_sums(rows, start, self.n)
        self.first += rows[..., self.skip_keys : self.edge].sum((1, 2))

    def edge_contrast(self) -> Float[Tensor, " fold"]:
        """Return the mean over the first 5% of kept keys less that over the others."""
        n_first = first_cells_by_distance(self.n, self.skip_keys).sum()
        n_others = n_kept_cells(self.n, self.skip_keys) - n_first
        return self.first / n_first - (self.by_distance.sum(1) - self.first) / n_others


class _ScoreSums:
    """Sums over blocks of rows of scores, of which the mean of each diagonal is subtracted."""

    def __init__(self, layer: LayerFolds, skip_keys: int) -> None:
        self.n, self.skip_keys, self.edge = layer.n, skip_keys, edge_keys(layer.n, skip_keys)
        self.sums = torch.zeros(layer.n_folds, layer.n, dtype=torch.float64)
        self.counts = torch.zeros(layer.n, dtype=torch.float64)
        self.kept = torch.zeros(layer.n_folds, layer.n, dtype=torch.float64)
        self.first = torch.zeros(layer.n_folds, dtype=torch.float64)
        self.total = torch.zeros(layer.n_folds, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "fold row key_pos"], start: int) -> None:
        query = torch.arange(start, start + rows.shape[1])[:, None]
        key = torch.arange(rows.shape[2])
        known = rows.isfinite().all(0) & (key <= query)
        self.sums += distance_sums(rows.where(known, 0.0), start, self.n)
        self.counts += distance_sums(known.double(), start, self.n)
        kept = rows.where((key < query) & (key >= self.skip_keys), 0.0)
        self.first += kept[..., : self.edge].sum((1, 2))
        self.total += kept.sum((1, 2))

    def edge_contrast(self) -> Float[Tensor, " fold"]:
        """Return the edge contrast of the scores less the mean of each diagonal."""
        first = first_cells_by_distance(self.n, self.skip_keys)
        others = cells_by_distance(self.n, self.skip_keys) - first
        contrast = self.first / first.sum() - (self.total - self.first) / others.sum()
        weights = first / first.sum() - others / others.sum()
        return contrast - (self.sums / self.counts.clamp_min(1)) @ weights


def cells_by_distance(n: int, skip_keys: int) -> Float[Tensor, " distance"]:
    """Return the number of kept cells at i - j = 0, 1, ..., n - 1; none is at 0.

    Example:
        >>> cells_by_distance(5, 1).tolist()
        [0.0, 3.0, 2.0, 1.0, 0.0]
    """
    counts = (n - skip_keys - torch.arange(n, dtype=torch.float64)).clamp_min(0)
    counts[0] = 0
    return counts


def first_cells_by_distance(n: int, skip_keys: int) -> Float[Tensor, " distance"]:
    """Return the number of kept cells at each distance whose keys are among the first 5%."""
    return cells_by_distance(n, skip_keys) - cells_by_distance(n, edge_keys(n, skip_keys))
