"""What removing components takes from the positional pattern of a layer, in nats."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval, cross_products, jackknife
from nope_probe.analyses.pattern import kept_cells, row_centred
from nope_probe.analyses.rounding import exceeds_rounding

Folds = Float[Tensor, "fold query_pos key_pos"]


def positional_part(
    scores: Folds,
    content: Folds,
    skip_keys: int = 0,
    counts: Int[Tensor, " fold"] | None = None,
) -> Float[Tensor, "fold cell"]:
    """Return p, the pattern less the pattern without the sources, in the kept cells, nats.

    It is 0 where it does not exceed the rounding of the scores.

    Args:
        scores: score maps, nats.
        content: those of the same model without mask and position encoding.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.
    """
    cells, both = kept_cells(scores.shape[-1], skip_keys), (scores.double(), content.double())
    part = row_centred(both[0] - both[1], skip_keys)[..., cells]
    score_square = sum(each[..., cells].square().mean() for each in both)
    squares = cross_products(part[None], part[None], counts)[:, 0, 0]
    return part if exceeds_rounding(squares, score_square) else torch.zeros_like(part)


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
