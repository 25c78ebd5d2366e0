"""What removing components takes from the positional pattern of each layer, in nats."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.analyses.jackknife import UNDEFINED, Interval, jackknife
from nope_probe.analyses.pattern import kept_cells, row_centred
from nope_probe.analyses.shapley import INTACT, Condition, Contrast


def pattern_lost(
    folds: Mapping[Condition, Float[Tensor, "fold query_pos key_pos"]],
    removed: Condition,
    sources: Condition,
    skip_keys: int = 0,
    counts: Int[Tensor, " fold"] | None = None,
) -> Interval:
    """Return what a removal takes from one layer's positional part p(all), in nats.

    p is the pattern less the pattern without the sources, which is content. The result is
    <p(all) - p(all less removed), p(all)> / RMS of p(all): all of that RMS if the part is gone,
    0 if it stays, more if it is reversed. Undefined where p(all) does not exceed its noise.

    Args:
        folds: score maps of the intact model, and of the models without the removed components,
            without the sources and without both, nats.
        removed: the components that are removed.
        sources: the mask and the position encoding.
        skip_keys: how many first keys to leave out.
        counts: sequences per fold; all the same by default.

    Raises:
        KeyError: if the maps of a condition are missing.
    """
    needed = list(dict.fromkeys((INTACT, removed, sources, removed | sources)))
    gram = ContrastGram(needed, _patterns([folds[each] for each in needed], skip_keys), counts)
    whole: Contrast = {INTACT: 1.0, sources: -1.0}
    lost = _sum(whole, {removed: -1.0}, {removed | sources: 1.0})
    square = gram.product(whole, whole)
    if not jackknife(square, counts).low > 0 or not (square > 0).all():
        return UNDEFINED
    return jackknife(gram.product(lost, whole) / square.sqrt(), counts)


def _patterns(
    maps: list[Float[Tensor, "fold query_pos key_pos"]], skip_keys: int
) -> Float[Tensor, "condition fold cell"]:
    cells = kept_cells(maps[0].shape[-1], skip_keys)
    return torch.stack([row_centred(each, skip_keys)[..., cells].double() for each in maps])


def _sum(*contrasts: Contrast) -> Contrast:
    total: dict[Condition, float] = {}
    for each in contrasts:
        for condition, weight in each.items():
            total[condition] = total.get(condition, 0.0) + weight
    return total
