"""The positional pattern in a score map, and measures of it.

Softmax ignores a constant per row. The pattern is therefore the score map less each row's mean over
the keys j < i. It is defined on the cells j < i, and NaN elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.conditions import (
    AnyMaps,
    FoldCounts,
    fold_counts_of,
    layer_folds,
    skipped_keys,
)
from nope_probe.analyses.estimates import edge_keys, measure_estimates
from nope_probe.analyses.jackknife import UNDEFINED, Interval, jackknife, rms, share
from nope_probe.analyses.pattern_rows import Folds, centred_rows, kept_cells
from nope_probe.analyses.relative import distance_rows, distance_sums, relative_fit
from nope_probe.errors import closed_choices


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measures of one layer's pattern P, each with a 95% interval.

    Locality and monotonicity are undefined where all scores of every row are equal.

    Attributes:
        amplitude: RMS of the pattern, nats, corrected for noise (so it can come out negative).
        locality: mean over rows of 8 keys or more of Spearman(P[i, j], j), -1 to 1. Noise biases
            it towards 0, and the next two towards 1/2.
        monotonicity: share of pairs with P[i, j+8] > P[i, j]; 1/2 is no trend.
        monotonicity_lag1: the same at lag 1; below 1,000 sequences it is mostly noise.
        relative_r2: share of <P, P> that has the form a(i) + f(i-j); 1 for ALiBi.
        non_relative: RMS of the rest, nats.
        edge_contrast: mean of the diagonal-normalised map over the first 5% of kept keys, less its
            mean over the others, nats (the paper's Figures 4 and 5).
        edge_contrast_visible: the same of the non-relative part, nats, which softmax acts on.
    """

    amplitude: Interval
    locality: Interval
    monotonicity: Interval
    monotonicity_lag1: Interval
    relative_r2: Interval
    non_relative: Interval
    edge_contrast: Interval
    edge_contrast_visible: Interval


@closed_choices("skip_keys")
def measure(
    maps: AnyMaps,
    skip_keys: int | Literal["auto"] = "auto",
    *,
    counts: FoldCounts | None = None,
) -> list[Measures]:
    """Measure the pattern of each layer.

    Above 512 positions, locality and monotonicity are of every (n/256)-th query, rounded up.

    Args:
        maps: what `capture_scores` returns, or fold means of scores, in nats.
        skip_keys: how many first keys to leave out, of the row mean too; `auto`: 1 where captured
            sequences all begin with the same token (BOS, an attention sink), else 0.
        counts: of fold means, the sequences per fold; all the same by default.

    Raises:
        ValueError: for a non-finite cell among j < i, fewer than 4 folds or too few keys.

    Example:
        >>> from nope_probe import capture_scores, gaussian, load, measure
        >>> vectors = gaussian(n_seqs=256, seq_len=13, d_model=64, alpha=0.3).inputs
        >>> maps = capture_scores(load("parameter-free").model, vectors)
        >>> measure(maps)[2].locality.value > 0.9
        True
    """
    skipped = skipped_keys([maps], skip_keys)
    counts = fold_counts_of([maps]) if counts is None else counts
    return [_measure(folds, skipped, counts) for folds in layer_folds(maps)]


def _measure(folds: Folds, skip_keys: int, counts: FoldCounts | None) -> Measures:
    found = measure_estimates(folds, skip_keys, counts)
    p_p, r_r = found["amplitude_squared"], found["non_relative_squared"]
    # Equal scores have no order: that every pair of keys ties says nothing of a trend.
    trends = {
        name: jackknife(found[name], counts) if p_p.any() else UNDEFINED
        for name in ("locality", "monotonicity", "monotonicity_lag1")
    }
    return Measures(
        **trends,
        amplitude=rms(p_p, counts),
        relative_r2=share(p_p - r_r, p_p, counts),
        non_relative=rms(r_r, counts),
        edge_contrast=jackknife(found["edge_contrast"], counts),
        edge_contrast_visible=jackknife(found["edge_contrast_visible"], counts),
    )


def row_centred(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Subtract from each row its mean over skip_keys <= j < i: the pattern in a score map.

    Other cells become NaN.

    Raises:
        ValueError: for a non-finite cell among j < i.

    Example:
        >>> row_centred(torch.tensor([[0., 0, 0], [5, 0, 0], [1, 3, 0]]))
        tensor([[nan, nan, nan],
                [ 0., nan, nan],
                [-1.,  1., nan]])
    """
    cells = kept_cells(maps.shape[-1], skip_keys)
    return centred_rows(maps, 0, skip_keys).where(cells, torch.nan)


def relative_part(
    patterns: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Return the projection of patterns on {a(i) + f(i-j)}, by minimum-norm least squares."""
    n = patterns.shape[-1]
    cells = kept_cells(n, skip_keys)
    inside = patterns.where(cells, 0.0)
    means = inside.sum(-1, keepdim=True) / cells.sum(-1, keepdim=True).clamp_min(1)
    centred = (inside - means).where(cells, 0.0)
    a, f = relative_fit(distance_sums(centred, 0, n), skip_keys)
    fit = means + a[..., None] + distance_rows(f, 0, n)
    return fit.where(cells, torch.nan)


def edge_contrast(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch"]:
    """Return the mean over the first 5% of kept keys (one at least) less that over the others."""
    n = maps.shape[-1]
    cells = kept_cells(n, skip_keys)
    first = cells.clone()
    first[:, edge_keys(n, skip_keys) :] = False
    return maps[..., first].mean(-1) - maps[..., cells & ~first].mean(-1)
