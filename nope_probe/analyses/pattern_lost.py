"""What removing components takes from the positional pattern of a layer, in nats."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval, cross_products, jackknife
from nope_probe.analyses.pattern import kept_cells, row_centred

Folds = Float[Tensor, "fold query_pos key_pos"]


def positional_part(
    scores: Folds, content: Folds, skip_keys: int = 0
) -> Float[Tensor, "fold cell"]:
    """Return p, the pattern less the pattern without the sources, in the kept cells, nats.

    Args:
        scores: score maps, nats.
        content: those of the same model without mask and position encoding.
        skip_keys: how many first keys to leave out.
    """
    cells = kept_cells(scores.shape[-1], skip_keys)
    return row_centred(scores.double() - content.double(), skip_keys)[..., cells]


def pattern_lost(
    whole: Float[Tensor, "fold cell"],
    left: Float[Tensor, "fold cell"],
    counts: Int[Tensor, " fold"] | None = None,
) -> Interval:
    """Return what a removal takes from the positional part p(all) of one layer, in nats.

    It is <p(all) - p(left), p(all)> / RMS of p(all): that RMS if the part is gone, 0 if it stays,
    more if it is reversed. Undefined where p(all) does not exceed its noise.

    Args:
        whole: the positional part of the intact model.
        left: the positional part of the model without the removed components.
        counts: sequences per fold; all the same by default.
    """
    parts = torch.stack([whole, left])
    gram = cross_products(parts, parts, counts)
    square, kept = gram[:, 0, 0], gram[:, 1, 0]
    if not jackknife(square, counts).low > 0 or not (square > 0).all():
        return UNDEFINED
    return jackknife((square - kept) / square.sqrt(), counts)
