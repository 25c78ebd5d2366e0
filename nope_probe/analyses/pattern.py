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

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval, jackknife, rms
from nope_probe.analyses.pattern_rows import (
    NonRelativeRows,
    beyond_rounding,
    distance_sums,
    mean_squares,
    names_of_parts,
)
from nope_probe.errors import UserError, closed_choices
from nope_probe.maps.estimates import Estimates, ProductSums
from nope_probe.maps.layers import Pattern, set_apart
from nope_probe.maps.maps import Layers, ScoreMaps, layers_of
from nope_probe.maps.rows import BLOCK_BYTES, QueryPositions

ORDERS = ("locality", "monotonicity")
LAG = 8
MIN_KEYS = 8
EXACT_ROWS = 512  # up to this number of rows, the keys of all queries are ordered
ORDERED_ROWS = 256  # above it, the keys of about this number of queries are ordered


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measures of one layer's pattern, each with a 95% interval.

    All but the amplitudes measure the shape of the pattern P among the other keys. Locality and
    monotonicity are undefined where all scores of every row are equal.

    Attributes:
        amplitude: RMS of the pattern, nats, corrected for noise (so it can come out negative).
        amplitude_first, amplitude_others: RMS of its part at the first keys, and of its part among
            the other keys, nats; their squares add up to that of `amplitude`.
        locality: mean over rows of 8 keys or more of Spearman(P[i, j], j), -1 to 1. Noise biases
            locality towards 0, and monotonicity towards 1/2.
        monotonicity: share of pairs with P[i, j+8] > P[i, j]; 1/2 is no trend.
        relative_r2: share of <P, P> that has the form a(i) + f(i-j); 1 for ALiBi.
        non_relative: RMS of the rest, nats.
        edge_contrast: mean of the diagonal-normalised map over the first 5% of kept keys, less its
            mean over the other keys, nats (the paper's Figures 4 and 5).
        edge_contrast_visible: the edge contrast of the non-relative part, which softmax sees, nats.
    """

    amplitude: Interval
    amplitude_first: Interval
    amplitude_others: Interval
    locality: Interval
    monotonicity: Interval
    relative_r2: Interval
    non_relative: Interval
    edge_contrast: Interval
    edge_contrast_visible: Interval


@closed_choices("skip_keys")
def measure(
    maps: ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"],
    skip_keys: int | Literal["auto"] = "auto",
    *,
    counts: Int[Tensor, " fold"] | None = None,
    query_positions: QueryPositions = None,
) -> list[Measures]:
    """Measure the pattern of each layer, in the order of the maps.

    For more than 512 rows, locality and monotonicity use every (rows/256)-th row, rounded up.

    Args:
        maps: the result of `capture_scores`, or fold means of scores, in nats.
        skip_keys: how many keys count as first; `auto`: 1 for captured maps of tokens, 0 for maps
            of vectors and for bare fold means.
        counts: for fold means, the sequences per fold; all the same by default.
        query_positions: for fold means, the queries of the rows; all by default.

    Raises:
        ValueError: for a non-finite cell among j < i, fewer than 4 folds, or too few keys.

    Example:
        >>> from nope_probe import capture_scores, gaussian, load, measure
        >>> vectors = gaussian(n_seqs=256, seq_len=13, d_model=64, alpha=0.3).inputs
        >>> maps = capture_scores(load("parameter-free").model, vectors)
        >>> measure(maps)[2].locality.value > 0.9
        True
    """
    layers = layers_of(maps, counts, query_positions)
    return [measure_pattern(layer.pattern) for layer in set_apart(layers, skip_keys).values()]


@closed_choices("skip_keys")
def measure_heads(
    maps: ScoreMaps | Layers, skip_keys: int | Literal["auto"] = "auto"
) -> dict[tuple[int, int], Measures]:
    """Measure the pattern of each head, by its layer and number, as `measure` does of a layer.

    Args:
        maps: the result of `capture_scores(..., per_head=True)`.
        skip_keys: how many keys count as first, as in `measure`.

    Raises:
        ValueError: as in `measure`, or for maps that were captured without heads.

    Example:
        >>> from nope_probe import capture_scores, load, measure_heads
        >>> loaded = load("rope-tiny")
        >>> tokens = loaded.model.to_tokens(["where does it come from?"] * 4)
        >>> maps = capture_scores(loaded.model, tokens, per_head=True)
        >>> measure_heads(maps)[1, 3].amplitude.value > 1
        True
    """
    layers = set_apart(layers_of(maps), skip_keys)
    if not all(layer.heads for layer in layers.values()):
        raise UserError("the maps have no heads: capture_scores(..., per_head=True) keeps them")
    return {
        (number, head): measure_pattern(maps_of_head.pattern)
        for number, layer in layers.items()
        for head, maps_of_head in enumerate(layer.heads)
    }


def measure_pattern(pattern: Pattern) -> Measures:
    """Measure the pattern of one layer, or of one head, as `measure` does."""
    estimates = pattern_estimates(pattern)
    # Equal scores have no order, so their ties must not count as "no trend".
    has_order = bool(estimates["amplitude_others_squared"].values.any())
    measures = {"relative_r2": UNDEFINED}
    for name, of_name in estimates.items():
        if name.endswith("_squared"):
            measures[name.removesuffix("_squared")] = rms(of_name)
        elif has_order or name not in ORDERS:
            measures[name] = jackknife(of_name)
        else:
            measures[name] = UNDEFINED
    return Measures(**measures)


def pattern_estimates(pattern: Pattern) -> dict[str, Estimates]:
    """Return the estimates of `Measures` by name; mean squares as `name`_squared, squared nats.

    `relative_r2` is missing where the pattern among the other keys does not exceed its noise.

    Args:
        pattern: the whole pattern of a layer or head.
    """
    shapes = measure_estimates(pattern.among_others)
    alone, rest = shapes.pop("amplitude_squared"), shapes["non_relative_squared"]
    others, first = (
        alone * (pattern.apart.count / max(1, pattern.visible.count)),
        _first_squares(pattern),
    )
    squares = (first + others, first, others)
    names = (f"{name}_squared" for name in names_of_parts("amplitude"))
    estimates = dict(zip(names, squares, strict=True)) | shapes
    if jackknife(alone).low > 0:
        estimates["relative_r2"] = (alone - rest) / alone
    return estimates


def _first_squares(pattern: Pattern) -> Estimates:
    """Return the mean square of the part at the first keys; 0 within the rounding of the scores."""
    if not pattern.has_first:
        zeros = torch.zeros(1 + pattern.n_folds, dtype=torch.float64)
        return Estimates(values=zeros, weights=pattern.maps.weights)
    sums, score_square = ProductSums(), torch.zeros((), dtype=torch.float64)
    for block in pattern.first.blocks():
        sums.add(block.rows[None])
        score_square += mean_squares(block.scores, block.start, pattern.visible).mean()
    return beyond_rounding(pattern.estimates(sums), score_square)


def measure_estimates(pattern: Pattern, *, n_bytes: int = BLOCK_BYTES) -> dict[str, Estimates]:
    """Return the estimates of a pattern's strength and shape: on all folds, then without each fold.

    `amplitude_squared` and `non_relative_squared` are unbiased mean squares, in squared nats; they
    are 0 within the rounding of the scores.

    Args:
        pattern: the pattern of a layer or head.
        n_bytes: memory for a block of rows.
    """
    maps, cells = pattern.maps, pattern.cells
    score_square = torch.zeros((), dtype=torch.float64)
    scores, patterns, trends = _ScoreSums(pattern), _PatternSums(pattern), TrendSums(pattern)
    for block in pattern.blocks(n_bytes):
        scores.add(block.scores, block.start)
        score_square += mean_squares(block.scores, block.start, cells).mean()
        patterns.add(block.rows, block.start)
        trends.add_block(block.rows, block.start)
    if not scores.counts.any():
        raise ValueError("a score map has no finite cell")
    rest, fit = _PatternSums(pattern), NonRelativeRows(patterns.by_distance, cells)
    for block in pattern.blocks(n_bytes):
        rest.add(fit.of(block.rows, block.start), block.start)
    squares, rest_squares = (
        beyond_rounding(pattern.estimates(sums.products), score_square) for sums in (patterns, rest)
    )
    contrast, visible = (
        Estimates.of_means(sums.edge_contrast(), maps.weights) for sums in (scores, rest)
    )
    return {
        "amplitude_squared": squares,
        "non_relative_squared": rest_squares,
        **trends.estimates(),
        "edge_contrast": contrast,
        "edge_contrast_visible": visible * float(rest_squares.values.any()),
    }


class _PatternSums:
    """Sums over blocks of rows of patterns, or of a part of them; 0 outside the kept cells."""

    def __init__(self, pattern: Pattern) -> None:
        self.cells, self.products, n_folds = pattern.cells, ProductSums(), pattern.n_folds
        self.by_distance = torch.zeros(n_folds, self.cells.n, dtype=torch.float64)
        self.first = torch.zeros(n_folds, dtype=torch.float64)

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

    def __init__(self, pattern: Pattern) -> None:
        self.n, self.cells, self.visible = pattern.maps.n, pattern.cells, pattern.maps.visible
        self.sums = torch.zeros(pattern.n_folds, self.n, dtype=torch.float64)
        self.counts = torch.zeros(self.n, dtype=torch.float64)
        self.first = torch.zeros(pattern.n_folds, dtype=torch.float64)
        self.total = torch.zeros(pattern.n_folds, dtype=torch.float64)

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


def edge_contrast(pattern: Pattern) -> Float[Tensor, " fold"]:
    """Return the edge contrast of the scores of each fold less the mean of each diagonal, nats."""
    scores = _ScoreSums(pattern)
    for block in pattern.blocks():
        scores.add(block.scores, block.start)
    return scores.edge_contrast()


def order_estimates(pattern: Pattern) -> dict[str, Estimates]:
    """Return the estimates of locality and monotonicity, by their names in `Measures`."""
    pattern = pattern.among_others
    trends = TrendSums(pattern)
    for block in pattern.blocks():
        trends.add_block(block.rows, block.start)
    return trends.estimates()


def query_stride(n_rows: int) -> int:
    """Return the stride between rows whose keys are ordered, in a map of n_rows rows.

    Example:
        >>> [query_stride(n) for n in (64, 512, 513, 1024, 4096)]
        [1, 1, 3, 4, 16]
    """
    return 1 if n_rows <= EXACT_ROWS else -(-n_rows // ORDERED_ROWS)


class TrendSums:
    """Sums of a pattern's locality and monotonicity, to which blocks of rows are added.

    The order of the keys is taken from the means over all sequences, then without each fold.
    """

    def __init__(self, pattern: Pattern) -> None:
        queries, n_maps = pattern.maps.queries, 1 + pattern.n_folds
        self.pattern = pattern
        self.queries = queries[:: query_stride(len(queries))].contiguous()
        self.n_rows = self.n_pairs = 0
        self.correlations = torch.zeros(n_maps, dtype=torch.float64)
        self.signs = torch.zeros(n_maps, dtype=torch.float64)

    def add_block(self, rows: Float[Tensor, "fold row key_pos"], start: int) -> None:
        """Add the rows of a block whose keys are ordered."""
        ends = torch.tensor([start, start + rows.shape[1]])
        first, behind = torch.searchsorted(self.queries, ends).tolist()
        chosen = self.queries[first:behind].tolist()
        means = self.pattern.maps.without_each(rows[:, [query - start for query in chosen]])
        for index, query in enumerate(chosen):
            self.add(means[:, index, int(self.pattern.cells.first[query]) : query])

    def add(self, row: Float[Tensor, "map key_pos"]) -> None:
        """Add the kept keys before one query."""
        n_keys = row.shape[-1]
        if n_keys >= MIN_KEYS:
            self.correlations += spearman_with_order(row)
            self.n_rows += 1
        if n_keys > LAG:
            self.signs += (row[:, LAG:] - row[:, :-LAG]).sign().sum(-1)
            self.n_pairs += n_keys - LAG

    @property
    def locality(self) -> Float[Tensor, " map"]:
        """The mean Spearman correlation of P[i, j] with j; NaN without rows of 8 keys."""
        return self.correlations / self.n_rows if self.n_rows else self.correlations * torch.nan

    @property
    def monotonicity(self) -> Float[Tensor, " map"]:
        """The share of pairs of keys with P[i, j+8] > P[i, j]; NaN without pairs."""
        return (self.signs / self.n_pairs + 1) / 2 if self.n_pairs else self.signs * torch.nan

    def estimates(self) -> dict[str, Estimates]:
        """Return the estimates of the measures by their names in `Measures`."""
        values = {"locality": self.locality, "monotonicity": self.monotonicity}
        weights = self.pattern.maps.weights
        return {name: Estimates(values=x, weights=weights) for name, x in values.items()}


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
