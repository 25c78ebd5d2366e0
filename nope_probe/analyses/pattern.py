"""The positional pattern in a score map, and measures of it.

Softmax ignores a constant per row. The pattern is therefore the score map less each row's mean over
the keys j < i that the query sees (a sliding window hides the first keys). The pattern is defined
on these cells, and NaN elsewhere.

Estimates are added up over blocks of rows of a layer's folds. Sums over cells, over the cells of a
distance and over the first keys are linear in the maps, so they are kept per fold. The order of
values is not linear, so it is taken from the means without each fold.

The order is read as locality and monotonicity. For more than 512 rows, both use every
(rows/256)-th row, rounded up. Ordering the keys of all queries would take longer than the model,
and neighbouring queries have similar patterns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    ProductSums,
    jackknife,
    leave_one_out,
    rms,
    share,
)
from nope_probe.analyses.pattern_rows import (
    Folds,
    NonRelativeRows,
    as_layer,
    beyond_rounding,
    distance_rows,
    distance_sums,
    mean_squares,
    pattern_rows,
    relative_fit,
)
from nope_probe.errors import UserError, closed_choices
from nope_probe.maps.centred import KeptCells, centred_rows, first_visible_keys
from nope_probe.maps.maps import ScoreMaps
from nope_probe.maps.rows import BLOCK_BYTES, QueryPositions, row_blocks, rows_of
from nope_probe.maps.stored_maps import LayerFolds, StoredMaps, TensorFolds, shared_cells

FoldMeans: TypeAlias = Float[Tensor, "fold layer row key_pos"]
AnyMaps: TypeAlias = ScoreMaps | StoredMaps | FoldMeans
FoldCounts: TypeAlias = Int[Tensor, " fold"]
LAG = 8
MIN_KEYS = 8
EXACT_ROWS = 512  # up to this number of rows, the keys of all queries are ordered
ORDERED_ROWS = 256  # above it, the keys of about this number of queries are ordered


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measures of one layer's pattern P, each with a 95% interval.

    Locality and monotonicity are undefined where all scores of every row are equal.

    Attributes:
        amplitude: RMS of the pattern, nats, corrected for noise (so it can come out negative).
        locality: mean over rows of 8 keys or more of Spearman(P[i, j], j), -1 to 1. Noise biases
            locality towards 0, and both monotonicities towards 1/2.
        monotonicity: share of pairs with P[i, j+8] > P[i, j]; 1/2 is no trend.
        monotonicity_lag1: monotonicity at lag 1; below 1,000 sequences it is mostly noise.
        relative_r2: share of <P, P> that has the form a(i) + f(i-j); 1 for ALiBi.
        non_relative: RMS of the rest, nats.
        edge_contrast: mean of the diagonal-normalised map over the first 5% of kept keys, less its
            mean over the other keys, nats (the paper's Figures 4 and 5).
        edge_contrast_visible: the edge contrast of the non-relative part, which softmax sees, nats.
    """

    amplitude: Interval
    locality: Interval
    monotonicity: Interval
    monotonicity_lag1: Interval
    relative_r2: Interval
    non_relative: Interval
    edge_contrast: Interval
    edge_contrast_visible: Interval


@overload
def measure(
    maps: AnyMaps,
    skip_keys: int | Literal["auto"] = "auto",
    *,
    counts: FoldCounts | None = None,
    query_positions: QueryPositions = None,
    per_head: Literal[False] = False,
) -> list[Measures]: ...


@overload
def measure(
    maps: AnyMaps,
    skip_keys: int | Literal["auto"] = "auto",
    *,
    counts: FoldCounts | None = None,
    query_positions: QueryPositions = None,
    per_head: Literal[True],
) -> list[list[Measures]]: ...


@closed_choices("skip_keys")
def measure(
    maps: AnyMaps,
    skip_keys: int | Literal["auto"] = "auto",
    *,
    counts: FoldCounts | None = None,
    query_positions: QueryPositions = None,
    per_head: bool = False,
) -> list[Measures] | list[list[Measures]]:
    """Measure the pattern of each layer, in the order of the maps, or of each of its heads.

    For more than 512 rows, locality and monotonicity use every (rows/256)-th row, rounded up.

    Args:
        maps: the result of `capture_scores`, or fold means of scores, in nats.
        skip_keys: how many first keys to leave out, also of the row mean; `auto`: 1 where captured
            sequences all begin with the same token (BOS, an attention sink), else 0.
        counts: for fold means, the sequences per fold; all the same by default.
        query_positions: for fold means, the queries of the rows; all by default.
        per_head: whether to measure each head: the result is a list of heads for each layer.
            Capture the maps with `per_head=True` for this.

    Raises:
        ValueError: for a non-finite cell among j < i, fewer than 4 folds, too few keys, or
            `per_head` with maps that were captured without heads.

    Example:
        >>> from nope_probe import capture_scores, gaussian, load, measure
        >>> vectors = gaussian(n_seqs=256, seq_len=13, d_model=64, alpha=0.3).inputs
        >>> maps = capture_scores(load("parameter-free").model, vectors)
        >>> measure(maps)[2].locality.value > 0.9
        True
    """
    skipped = skipped_keys([maps], skip_keys)
    counts = fold_counts_of([maps]) if counts is None else counts
    if not per_head:
        layers = layer_folds(maps, query_positions)
        return [measure_layer(folds, skipped, counts) for folds in layers.values()]
    heads = None if isinstance(maps, Tensor) else maps.per_head
    if isinstance(maps, Tensor) or heads is None:
        raise UserError("the maps have no heads: capture_scores(..., per_head=True) keeps them")
    return [
        [
            measure_layer(TensorFolds(head, maps.query_positions), skipped, counts)
            for head in layer.unbind(1)
        ]
        for layer in heads[...].unbind(1)
    ]


def measure_layer(folds: Folds, skip_keys: int, counts: FoldCounts | None = None) -> Measures:
    """Measure the pattern of one layer, or of one head, as `measure` does."""
    estimates = measure_estimates(folds, skip_keys, counts)
    p_p, r_r = estimates["amplitude_squared"], estimates["non_relative_squared"]
    # Equal scores have no order, so their ties must not count as "no trend".
    trends = {
        name: jackknife(estimates[name], counts) if p_p.any() else UNDEFINED
        for name in ("locality", "monotonicity", "monotonicity_lag1")
    }
    return Measures(
        **trends,
        amplitude=rms(p_p, counts),
        relative_r2=share(p_p - r_r, p_p, counts),
        non_relative=rms(r_r, counts),
        edge_contrast=jackknife(estimates["edge_contrast"], counts),
        edge_contrast_visible=jackknife(estimates["edge_contrast_visible"], counts),
    )


def layer_folds(maps: AnyMaps, query_positions: QueryPositions = None) -> dict[int, LayerFolds]:
    """Return the fold means of each layer's scores, in nats, by the layer's number."""
    if isinstance(maps, StoredMaps):
        return {layer.index: layer.folds for layer in maps.layers}
    queries: QueryPositions
    if isinstance(maps, ScoreMaps):
        folds, layers, queries = maps.folds, maps.layers, maps.query_positions
    else:
        folds, layers, queries = maps, tuple(range(maps.shape[1])), query_positions
    return {layer: TensorFolds(folds[:, place], queries) for place, layer in enumerate(layers)}


def skipped_keys(maps: Iterable[AnyMaps], skip_keys: int | Literal["auto"]) -> int:
    """Return how many first keys to leave out of some maps.

    `auto` is 1 where all captured sequences begin with the same token (a BOS token, which is an
    attention sink), else 0. For bare fold means it is 0.
    """
    if skip_keys == "auto":
        return int(any(not isinstance(captured, Tensor) and captured.bos for captured in maps))
    return skip_keys


def fold_counts_of(maps: Iterable[AnyMaps]) -> FoldCounts | None:
    """Return the sequences per fold of maps on the same sequences; None if the maps lack counts.

    Raises:
        ValueError: if the maps' counts differ.
    """
    counts = [captured.counts for captured in maps if not isinstance(captured, Tensor)]
    if any(not torch.equal(count, counts[0]) for count in counts):
        raise ValueError("maps have folds of different sizes: capture them on the same sequences")
    return counts[0] if counts else None


def measure_estimates(
    folds: Folds,
    skip_keys: int,
    counts: FoldCounts | None = None,
    *,
    n_bytes: int = BLOCK_BYTES,
) -> dict[str, Float[Tensor, " one_plus_folds"]]:
    """Return the estimates behind the intervals of `measure`: on all folds, then without each fold.

    `amplitude_squared` and `non_relative_squared` are unbiased mean squares, in squared nats; they
    are 0 within the rounding of the scores.

    Args:
        folds: fold means of one layer's scores, nats.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
        n_bytes: memory for a block of rows.
    """
    layer = as_layer(folds)
    cells = shared_cells([layer], skip_keys)
    score_square = torch.zeros((), dtype=torch.float64)
    scores, patterns = _ScoreSums(layer, cells), _PatternSums(layer, cells)
    trends = TrendSums(1 + layer.n_folds, layer.query_positions)
    for start, stop in row_blocks(layer.query_positions, layer.n, layer.n_folds, n_bytes):
        raw = layer.rows(start, stop).double()
        rows = centred_rows(raw, cells.rows(start, stop))
        scores.add(raw, start)
        score_square += mean_squares(raw, start, cells).mean()
        patterns.add(rows, start)
        chosen = trends.chosen(start, stop)
        means = leave_one_out(rows[:, [query - start for query in chosen]], counts)
        for index, query in enumerate(chosen):
            trends.add(means[:, index, int(cells.first[query]) : query])
    if not scores.counts.any():
        raise ValueError("a score map has no finite cell")
    rest, fit = _PatternSums(layer, cells), NonRelativeRows(patterns.by_distance, cells)
    for start, rows in pattern_rows(layer, cells, n_bytes):
        rest.add(fit.of(rows, start), start)
    squares, rest_squares = (
        beyond_rounding(sums.products.cross_products(cells.count, counts)[:, 0, 0], score_square)
        for sums in (patterns, rest)
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


class _PatternSums:
    """Sums over blocks of rows of patterns, or of a part of them; 0 outside the kept cells."""

    def __init__(self, layer: LayerFolds, cells: KeptCells) -> None:
        self.cells, self.products = cells, ProductSums()
        self.by_distance = torch.zeros(layer.n_folds, layer.n, dtype=torch.float64)
        self.first = torch.zeros(layer.n_folds, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "fold row key_pos"], start: int) -> None:
        """Add a block of rows, from the query `start` on."""
        self.products.add(rows[None])
        self.by_distance += distance_sums(rows, start, self.cells.n)
        self.first += rows[..., self.cells.skip_keys : self.cells.edge].sum((1, 2))

    def edge_contrast(self) -> Float[Tensor, " fold"]:
        """Return the mean over the first 5% of kept keys less the mean over the other keys."""
        n_first = self.cells.first_by_distance.sum()
        n_others = self.cells.count - n_first
        return self.first / n_first - (self.by_distance.sum(1) - self.first) / n_others


class _ScoreSums:
    """Sums over blocks of rows of scores, from which each diagonal's mean is subtracted."""

    def __init__(self, layer: LayerFolds, cells: KeptCells) -> None:
        self.n, self.cells, self.visible = layer.n, cells, layer.kept_cells(0)
        self.sums = torch.zeros(layer.n_folds, layer.n, dtype=torch.float64)
        self.counts = torch.zeros(layer.n, dtype=torch.float64)
        self.first = torch.zeros(layer.n_folds, dtype=torch.float64)
        self.total = torch.zeros(layer.n_folds, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "fold row key_pos"], start: int) -> None:
        known = rows.isfinite().all(0).tril(start)
        if not known[self.visible.rows(start, start + rows.shape[1])].all():
            raise ValueError("a score map has a non-finite cell below the diagonal")
        self.sums += distance_sums(rows.where(known, 0.0), start, self.n)
        self.counts += distance_sums(known.double(), start, self.n)
        kept = rows.where(self.cells.rows(start, start + rows.shape[1]), 0.0)
        self.first += kept[..., : self.cells.edge].sum((1, 2))
        self.total += kept.sum((1, 2))

    def edge_contrast(self) -> Float[Tensor, " fold"]:
        """Return the edge contrast of the scores less the mean of each diagonal."""
        first = self.cells.first_by_distance
        others = self.cells.by_distance - first
        contrast = self.first / first.sum() - (self.total - self.first) / others.sum()
        weights = first / first.sum() - others / others.sum()
        return contrast - (self.sums / self.counts.clamp_min(1)) @ weights


def relative_part(
    patterns: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Return the projection of patterns on {a(i) + f(i-j)}, by minimum-norm least squares.

    Several patterns are projected on the cells that all of them have.
    """
    n = patterns.shape[-1]
    kept = KeptCells.of_maps(patterns, skip_keys)
    cells = kept.rows(0, n)
    inside = patterns.where(cells, 0.0)
    means = inside.sum(-1, keepdim=True) / cells.sum(-1, keepdim=True).clamp_min(1)
    centred = (inside - means).where(cells, 0.0)
    a, f = relative_fit(distance_sums(centred, 0, n), kept)
    fit = means + a[..., None] + distance_rows(f, 0, n)
    return fit.where(cells, torch.nan)


def edge_contrast(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch"]:
    """Return the mean over the first 5% of kept keys (one at least) less that over other keys.

    Several maps are compared on the cells that all of them have.
    """
    kept = KeptCells.of_maps(maps, skip_keys)
    cells = kept.rows(0, kept.n)
    first = cells.clone()
    first[:, kept.edge :] = False
    return maps[..., first].mean(-1) - maps[..., cells & ~first].mean(-1)


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
