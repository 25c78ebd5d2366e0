"""How far the package's maps of a tiny decoder are from plain transformers', intact and ablated."""

from typing import Any

import torch
from support.plain_attention import has_rope, plain_attention
from support.tiny_models import Tiny

from nope_probe import Ablation, ablated, capture_scores

REMOVALS: dict[str, tuple[str, ...]] = {
    "intact": (),
    "mask": ("mask",),
    "window": ("window",),
    "mask and window": ("mask", "window"),
    "rope": ("rope",),
}


def removals_of(tiny: Tiny) -> list[str]:
    """Return the rows of `REMOVALS` whose components a decoder has; none without attention."""
    attention = plain_attention(tiny.hf, tiny.tokens).values()
    if not attention:
        return []
    whole = tiny.tokens.shape[1] * (tiny.tokens.shape[1] + 1) // 2
    windowed = any((~layer.scores[0, 0].isnan()).sum() < whole for layer in attention)
    names = ["intact", "mask", *(["window", "mask and window"] if windowed else [])]
    return [*names, "rope"] if has_rope(tiny.hf) else names


def map_error(model: Any, tiny: Tiny, removal: str) -> float:
    """Return the largest difference of a layer's map, relative to the map's largest score.

    The difference is infinite where other cells are visible than in plain transformers.
    """
    without = removal if removal not in ("intact", "rope") else None
    plain = plain_attention(tiny.hf, tiny.tokens, without=without, rope=removal != "rope")
    with ablated(model, Ablation(remove=REMOVALS[removal])):
        maps = capture_scores(model, tiny.tokens, layers=list(plain)).mean
    errors = []
    for measured, attention in zip(maps, plain.values(), strict=True):
        same_cells = measured.isnan().equal(attention.map.isnan())
        error = (
            measured - attention.map
        ).abs().nan_to_num() / attention.map.nan_to_num().abs().max()
        errors.append(float(error.max()) if same_cells else torch.inf)
    return max(errors)
