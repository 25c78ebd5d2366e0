"""The mask's effect on the non-relative part of a pattern (the paper's section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, ProductSums, jackknife, rms, signed_root
from nope_probe.analyses.pattern_rows import (
    Folds,
    NonRelativeRows,
    as_layer,
    centred_rows,
    n_kept_cells,
    pattern_distance_sums,
)
from nope_probe.analyses.rounding import beyond_rounding, mean_squares
from nope_probe.hooks.layer_folds import LayerFolds, row_blocks


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """RMS of the non-relative part with and without the mask, nats (the paper's section 5).

    Attributes:
        difference: with the mask less without it, paired.
    """

    with_mask: Interval
    without_mask: Interval
    difference: Interval


def mask_effect(
    with_mask: Folds,
    without_mask: Folds,
    skip_keys: int = 0,
    counts: Int[Tensor, " fold"] | None = None,
) -> MaskEffect:
    """Return the RMS of one layer's non-relative part with and without the mask, and its change.

    Args:
        with_mask: fold maps of the intact model's score, nats.
        without_mask: the same without the mask, on the same sequences.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
    """
    with_square, without_square = (
        non_relative_squares(as_layer(each), skip_keys, counts)
        for each in (with_mask, without_mask)
    )
    return MaskEffect(
        with_mask=rms(with_square, counts),
        without_mask=rms(without_square, counts),
        difference=jackknife(_roots(with_square) - _roots(without_square), counts),
    )


def non_relative_squares(
    folds: LayerFolds, skip_keys: int, counts: Int[Tensor, " fold"] | None
) -> Float[Tensor, " one_plus_folds"]:
    """Return the mean square of the non-relative part, on all folds and without each.

    It is 0 within the rounding of the scores.
    """
    n_cells, products = n_kept_cells(folds.n, skip_keys), ProductSums()
    rest = NonRelativeRows(pattern_distance_sums(folds, skip_keys), skip_keys)
    score_square = torch.zeros((), dtype=torch.float64)
    for start, stop in row_blocks(folds.n, folds.n_folds):
        raw = folds.rows(start, stop).double()
        score_square += mean_squares(raw, start, skip_keys, n_cells).mean()
        products.add(rest.of(centred_rows(raw, start, skip_keys), start)[None])
    return beyond_rounding(products.cross_products(n_cells, counts)[:, 0, 0], score_square)


def _roots(squares: Float[Tensor, " one_plus_folds"]) -> Float[Tensor, " one_plus_folds"]:
    return torch.tensor([signed_root(float(square)) for square in squares], dtype=torch.float64)
