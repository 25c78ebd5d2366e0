"""The mask's effect on the non-relative part of a pattern (the paper's section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, cross_products, jackknife, rms, signed_root
from nope_probe.analyses.pattern import kept_cells, relative_part, row_centred


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
    with_mask: Float[Tensor, "fold query_pos key_pos"],
    without_mask: Float[Tensor, "fold query_pos key_pos"],
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
    patterns = torch.stack(
        [row_centred(each.double(), skip_keys) for each in (with_mask, without_mask)]
    )
    rest = patterns - relative_part(patterns, skip_keys)
    cells = kept_cells(patterns.shape[-1], skip_keys)
    squares = cross_products(rest[..., cells], rest[..., cells], counts)
    with_square, without_square = squares[:, 0, 0], squares[:, 1, 1]
    return MaskEffect(
        with_mask=rms(with_square, counts),
        without_mask=rms(without_square, counts),
        difference=jackknife(_roots(with_square) - _roots(without_square), counts),
    )


def _roots(squares: Float[Tensor, " one_plus_folds"]) -> Float[Tensor, " one_plus_folds"]:
    return torch.tensor([signed_root(float(square)) for square in squares], dtype=torch.float64)
