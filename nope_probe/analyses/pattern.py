"""The positional pattern in a score map, and measures of it.

Softmax ignores a constant per row. The pattern is therefore the score map less each row's mean over
the keys j < i. It is defined on the cells j < i, and NaN elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.analyses.conditions import (
    FoldCounts,
    FoldMeans,
    fold_counts_of,
    fold_means,
    skipped_keys,
)
from nope_probe.analyses.jackknife import (
    UNDEFINED,
    Interval,
    cross_products,
    jackknife,
    leave_one_out,
    rms,
    share,
)
from nope_probe.hooks.maps import ScoreMaps, diagonal_normalised

LAG = 8
MIN_KEYS = 8
EDGE = 0.05


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


def measure(
    maps: ScoreMaps | FoldMeans,
    skip_keys: int | Literal["auto"] = "auto",
    *,
    counts: FoldCounts | None = None,
) -> list[Measures]:
    """Measure the pattern of each layer.

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
    folds, skipped = fold_means(maps), skipped_keys([maps], skip_keys)
    counts = fold_counts_of([maps]) if counts is None else counts
    return [_measure(folds[:, layer].double(), skipped, counts) for layer in range(folds.shape[1])]


def _measure(
    folds: Float[Tensor, "fold query_pos key_pos"], skip_keys: int, counts: FoldCounts | None
) -> Measures:
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


def measure_estimates(
    folds: Float[Tensor, "fold query_pos key_pos"],
    skip_keys: int,
    counts: FoldCounts | None = None,
) -> dict[str, Float[Tensor, " one_plus_folds"]]:
    """Return what `measure` makes intervals from: each on all folds, then without each fold.

    `amplitude_squared` and `non_relative_squared` are unbiased mean squares, in squared nats.
    """
    patterns = row_centred(folds, skip_keys)
    rest = patterns - relative_part(patterns, skip_keys)
    cells = kept_cells(folds.shape[-1], skip_keys)
    maps = torch.stack([patterns[:, cells], rest[:, cells]])
    products = cross_products(maps, maps, counts)
    means, rests = leave_one_out(patterns, counts), leave_one_out(rest, counts)
    diagonal = diagonal_normalised(leave_one_out(folds, counts))
    return {
        "amplitude_squared": products[:, 0, 0],
        "non_relative_squared": products[:, 1, 1],
        "locality": locality(means, skip_keys),
        "monotonicity": monotonicity(means, LAG, skip_keys),
        "monotonicity_lag1": monotonicity(means, 1, skip_keys),
        "edge_contrast": edge_contrast(diagonal, skip_keys),
        "edge_contrast_visible": edge_contrast(rests, skip_keys),
    }


def kept_cells(n: int, skip_keys: int = 0) -> Bool[Tensor, "query_pos key_pos"]:
    """Return the cells on which patterns are defined: skip_keys <= j < i.

    Raises:
        ValueError: if no row has two of them.
    """
    if not 0 <= skip_keys <= n - 3:
        raise ValueError(
            f"expected from 0 to {n - 3} skipped keys at {n} positions, got {skip_keys}"
        )
    cells = torch.ones(n, n, dtype=torch.bool).tril(-1)
    cells[:, :skip_keys] = False
    return cells


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
    inside = maps.where(cells, 0.0)
    if not inside.isfinite().all():
        raise ValueError("a score map has a non-finite cell below the diagonal")
    # Less a key of its own first: rounding would leave a pattern in a row of equal scores.
    inside = (inside - inside[..., skip_keys, None]).where(cells, 0.0)
    counts = cells.sum(-1, keepdim=True).clamp_min(1)
    centred = inside - inside.sum(-1, keepdim=True) / counts
    return centred.where(cells, torch.nan)


def relative_part(
    patterns: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Return the projection of patterns on {a(i) + f(i-j)}, by minimum-norm least squares."""
    n = patterns.shape[-1]
    cells, lag = kept_cells(n, skip_keys), _lags(n)
    rows, solve = (t.to(patterns.dtype) for t in _normal_equations(n, skip_keys))
    inside = patterns.where(cells, 0.0)
    row_sums = inside.sum(-1)
    by_lag = torch.zeros(*patterns.shape[:-2], n, dtype=patterns.dtype)
    by_lag.index_add_(-1, lag.flatten().clamp_min(0), inside.flatten(-2))
    incidence = _incidence(n, skip_keys).to(patterns.dtype)
    f = (by_lag - (row_sums * rows) @ incidence) @ solve
    a = (row_sums - f @ incidence.T) * rows
    fit = a[..., :, None] + f[..., lag.clamp_min(0)]
    return fit.where(cells, torch.nan)


def _lags(n: int) -> Tensor:
    position = torch.arange(n)
    return position[:, None] - position[None, :]


def _incidence(n: int, skip_keys: int) -> Tensor:
    """Return which row has which lag, as 0 and 1: row i has the lags 1 to i - skip_keys."""
    row, lag = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return ((lag >= 1) & (lag <= row - skip_keys)).double()


@lru_cache(maxsize=8)
def _normal_equations(n: int, skip_keys: int) -> tuple[Tensor, Tensor]:
    """Return 1/(cells per row), and the pseudo-inverse for f once a is eliminated."""
    incidence = _incidence(n, skip_keys)
    per_row = incidence.sum(1)
    rows = torch.where(per_row > 0, 1 / per_row.clamp_min(1), 0.0)
    schur = torch.diag(incidence.sum(0)) - incidence.T @ (rows[:, None] * incidence)
    return rows, torch.linalg.pinv(schur, hermitian=True)


def locality(
    patterns: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch"]:
    """Return the Spearman correlation of P[i, j] with j, averaged over rows of 8 keys or more.

    A constant row counts as 0; without rows of 8 keys the mean is NaN.
    """
    n = patterns.shape[-1]
    if n - skip_keys <= MIN_KEYS:
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    rows = [
        _spearman_with_order(patterns[..., i, skip_keys:i]) for i in range(skip_keys + MIN_KEYS, n)
    ]
    return torch.stack(rows).mean(0)


def _spearman_with_order(values: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    ranks = _ranks(values.contiguous())
    ranks = ranks - ranks.mean(-1, keepdim=True)
    order = torch.arange(values.shape[-1], dtype=values.dtype)
    order = order - order.mean()
    norms = ranks.norm(dim=-1) * order.norm()
    return torch.where(norms > 0, (ranks @ order) / norms.clamp_min(1e-300), 0.0)


def _ranks(values: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch key"]:
    """Return ranks from 0; ties get the mean of the ranks that they span."""
    ordered, places = values.sort(-1)
    if (ordered[..., 1:] > ordered[..., :-1]).all():  # without ties, the usual case: much faster
        order = torch.arange(values.shape[-1], dtype=values.dtype).expand_as(values)
        return torch.empty_like(values).scatter_(-1, places, order)
    ordered = ordered.contiguous()
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to - 1).to(values.dtype) / 2


def monotonicity(
    patterns: Float[Tensor, "*batch query_pos key_pos"], lag: int = LAG, skip_keys: int = 0
) -> Float[Tensor, "*batch"]:
    """Return the share of pairs of kept keys with P[i, j+lag] > P[i, j]; a tie counts as half."""
    cells = kept_cells(patterns.shape[-1], skip_keys)
    pairs = cells[:, lag:] & cells[:, :-lag]
    if not pairs.any():
        return torch.full(patterns.shape[:-2], torch.nan, dtype=patterns.dtype)
    step = (patterns[..., :, lag:] - patterns[..., :, :-lag])[..., pairs]
    return (step.sign() + 1).mean(-1) / 2


def edge_contrast(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch"]:
    """Return the mean over the first 5% of kept keys (one at least) less that over the others."""
    n = maps.shape[-1]
    cells = kept_cells(n, skip_keys)
    first = cells.clone()
    first[:, skip_keys + max(1, round(EDGE * (n - skip_keys))) :] = False
    return maps[..., first].mean(-1) - maps[..., cells & ~first].mean(-1)
