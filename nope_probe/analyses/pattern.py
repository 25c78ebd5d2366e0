"""Measures of a score map: the first key's lead, and the pattern among the other keys.

Estimates are added up over blocks of rows of a layer's folds. Leads, and sums over cells and over
the cells of a distance, are linear in the maps, so they are kept per fold. The order of values is
not linear, so it is taken from the means without each fold.

The order is read as locality and monotonicity. For more than 512 rows, both use every
(rows/256)-th row, rounded up. Ordering the keys of all queries would take longer than the model,
and neighbouring queries have similar patterns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, ByLayer, Interval, jackknife, rms
from nope_probe.analyses.pattern_rows import PatternSums, beyond_rounding, mean_squares
from nope_probe.errors import validate_types
from nope_probe.maps.estimates import Estimates, leave_one_out
from nope_probe.maps.layers import MIN_KEYS, LayerMaps, Pattern, with_skip_keys
from nope_probe.maps.maps import Layers, ScoreMaps, heads_of, maps_by_layer
from nope_probe.maps.rows import BLOCK_BYTES, QueryPositions

ORDERS = ("locality", "monotonicity")
LAG = 8
EXACT_ROWS = 512  # up to this number of rows, the keys of all queries are ordered
ORDERED_ROWS = 256  # above it, the keys of about this number of queries are ordered


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measures of one layer's lead and pattern, each with a 95% interval.

    All but the lead measure the pattern P among the other keys. Locality and monotonicity are
    undefined where all scores of every row are equal.

    Attributes:
        lead: the score of the first key less the mean of the other earlier keys, nats: the mean
            over queries that see it and 8 other keys or more. Undefined where no key is first.
        amplitude: RMS of the pattern, nats, corrected for noise (so it can come out negative).
        locality: mean over rows of 8 keys or more of Spearman(P[i, j], j), -1 to 1. Noise biases
            locality towards 0, and monotonicity towards 1/2.
        monotonicity: share of pairs with P[i, j+8] > P[i, j]; 1/2 is no trend.
        relative_r2: share of <P, P> that has the form a(i) + f(i-j); 1 for ALiBi.
        not_by_distance: RMS of the rest, nats.
    """

    lead: Interval
    amplitude: Interval
    locality: Interval
    monotonicity: Interval
    relative_r2: Interval
    not_by_distance: Interval

    def rows(self) -> Iterable[tuple[dict[str, str], Mapping[str, Interval]]]:
        """Yield the one row of a table, of which the layer or head is all that names it."""
        yield {}, vars(self)


def measure(
    maps: ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"],
    skip_keys: int | Literal["auto"] = "auto",
    *,
    counts: Int[Tensor, " fold"] | None = None,
    query_positions: QueryPositions = None,
) -> ByLayer[int, Measures]:
    """Measure the lead and the pattern of each layer, by its number.

    For more than 512 rows, locality and monotonicity use every (rows/256)-th row, rounded up.

    Args:
        maps: the result of `capture_scores`, or fold means of scores, in nats.
        skip_keys: how many keys count as first; `auto`: 1 for captured maps of tokens, 0 for maps
            of vectors and for bare fold means.
        counts: for fold means, the sequences per fold; all the same by default.
        query_positions: for fold means, the queries of the rows; all by default.

    Raises:
        UserError: for fewer than 4 folds, or too few keys.
        ValueError: for a non-finite cell among j < i.

    Example:
        >>> from nope_probe import capture_scores, gaussian, load, measure
        >>> vectors = gaussian(n_seqs=256, seq_len=13, d_model=64, alpha=0.3).inputs
        >>> maps = capture_scores(load("parameter-free").model, vectors)
        >>> measure(maps)[2].locality.value > 0.9
        True
    """
    validate_types({"skip_keys": int | Literal["auto"]}, {"skip_keys": skip_keys})
    layers = maps_by_layer(maps, counts, query_positions)
    layers = with_skip_keys(layers, skip_keys)
    return ByLayer({number: measure_pattern(layer.pattern) for number, layer in layers.items()})


def measure_heads(maps: ScoreMaps | Layers) -> ByLayer[tuple[int, int], Measures]:
    """Measure the lead and pattern of each head, by layer and number, as `measure` does of a layer.

    Args:
        maps: the result of `capture_scores(..., per_head=True)`.

    Raises:
        UserError: as in `measure`, or for maps that were captured without heads.

    Example:
        >>> from nope_probe import capture_scores, load, measure_heads
        >>> loaded = load("rope-tiny")
        >>> tokens = loaded.model.to_tokens(["where does it come from?"] * 4)
        >>> maps = capture_scores(loaded.model, tokens, per_head=True)
        >>> measure_heads(maps)[1, 3].amplitude.value > 1
        True
    """
    heads = heads_of(maps_by_layer(maps))
    return ByLayer({place: measure_pattern(head.pattern) for place, head in heads.items()})


def measure_pattern(pattern: Pattern) -> Measures:
    """Measure the lead and the pattern of one layer, or of one head, as `measure` does."""
    estimates = measure_estimates(pattern)
    # Equal scores have no order, so their ties must not count as "no trend".
    has_order = bool(estimates["amplitude_squared"].values.any())
    measures = dict.fromkeys(Measures.__dataclass_fields__, UNDEFINED)
    for name, of_name in estimates.items():
        if name.endswith("_squared"):
            measures[name.removesuffix("_squared")] = rms(of_name)
        elif has_order or name not in ORDERS:
            measures[name] = jackknife(of_name)
    return Measures(**measures)


def measure_estimates(pattern: Pattern, *, n_bytes: int = BLOCK_BYTES) -> dict[str, Estimates]:
    """Return the estimates of `Measures` by name; mean squares as `name`_squared, squared nats.

    `relative_r2` is missing where the pattern does not exceed its noise, and `lead` where there is
    none. Mean squares are unbiased, and 0 within the rounding of the scores.

    Args:
        pattern: the pattern of a layer or head.
        n_bytes: memory for a block of rows.
    """
    maps, cells, lead = pattern.maps, pattern.cells, pattern.lead
    score_square, leads = torch.zeros((), dtype=torch.float64), []
    patterns, trends = PatternSums(cells), TrendSums(pattern)
    known = torch.zeros((), dtype=torch.bool)
    for block in pattern.blocks(n_bytes):
        known |= validated_cells(block.scores, block.start, maps).any()
        score_square += mean_squares(block.scores, block.start, cells).mean()
        patterns.add(block.rows, block.queries)
        trends.add(block.rows, block.start)
        if lead is not None:
            leads.append(lead.rows(block.scores, block.start))
    if not known:
        raise ValueError("a score map has no finite cell")
    squares, rest_squares = (
        beyond_rounding(pattern.estimates(gram), score_square) for gram in patterns.grams
    )
    estimates = {
        "amplitude_squared": squares,
        "not_by_distance_squared": rest_squares,
        **trends.estimates(),
    }
    if leads:
        estimates["lead"] = Estimates.of_means(torch.cat(leads, -1).mean(-1), maps.weights)
    if jackknife(squares).low > 0:
        estimates["relative_r2"] = (squares - rest_squares) / squares
    return estimates


def validated_cells(
    scores: Float[Tensor, "fold row key_pos"], start: int, maps: LayerMaps
) -> Bool[Tensor, "row key_pos"]:
    """Return the cells j <= i of a block of rows that hold a number in every fold.

    Raises:
        ValueError: for a cell j < i that is visible and not finite.
    """
    known = scores.isfinite().all(0).tril(start)
    if not known[maps.visible.rows(start, start + scores.shape[1])].all():
        raise ValueError("a score map has a non-finite cell below the diagonal")
    return known


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
        queries = pattern.maps.queries
        self.pattern = pattern
        self.queries = queries[:: query_stride(len(queries))].contiguous()
        self.n_rows, self.n_pairs = 0, 0
        self.correlations, self.signs = torch.zeros(2, 1 + pattern.n_folds, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "fold row key_pos"], start: int) -> None:
        """Add the rows of a block whose keys are ordered."""
        ends = torch.tensor([start, start + rows.shape[1]])
        first, behind = torch.searchsorted(self.queries, ends).tolist()
        chosen = self.queries[first:behind].tolist()
        of_chosen = rows[:, [query - start for query in chosen]]
        means = leave_one_out(of_chosen, self.pattern.maps.weights)
        for index, query in enumerate(chosen):
            row = means[:, index, int(self.pattern.cells.first[query]) : query]
            if row.shape[1] >= MIN_KEYS:
                self.correlations += spearman_with_order(row)
                self.n_rows += 1
            steps = row[:, LAG:] - row[:, :-LAG]
            self.signs += steps.sign().sum(1)
            self.n_pairs += steps.shape[1]

    def estimates(self) -> dict[str, Estimates]:
        """Return the estimates of `Measures`; NaN without a row of 8 keys, or a pair of keys."""
        values = {
            "locality": self.correlations / self.n_rows,
            "monotonicity": (self.signs / self.n_pairs + 1) / 2,
        }
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
    from scipy.stats import rankdata  # takes half a second to import

    ranks = torch.from_numpy(rankdata(values.numpy(), axis=-1))
    ranks = ranks - ranks.mean(-1, keepdim=True)
    norms = ranks.norm(dim=-1) * order.norm()
    return torch.where(norms > 0, (ranks @ order) / norms.clamp_min(1e-300), 0.0)
