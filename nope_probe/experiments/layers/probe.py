"""Find what each layer of a model does about position, by intervening on one short batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.analyses.recover import (
    MaskShape,
    Rotation,
    ScoreProduct,
    fit_score_product,
    mask_shape,
    power_law,
    recover_rotation,
)
from nope_probe.hooks.layers.model import Inputs
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.batch_readings import LayerReading
from nope_probe.hooks.reading.batch_readings import hooks_scaling
from nope_probe.hooks.reading.batch_readings import hooks_without_learned_positions
from nope_probe.hooks.reading.batch_readings import hooks_without_rope
from nope_probe.hooks.reading.batch_readings import read_layers
from nope_probe.hooks.reading.batch_readings import visible_cells

N_SHORT = 48  # positions of the batch on which everything but the mask is found
UPSCALED = 64.0  # q and k times this: a norm undoes it, and a soft cap shows
ACTS = 1e-5  # of the largest score: a smaller change is rounding
LongInputs = Int[Tensor, "one long_pos"] | Float[Tensor, "one long_pos d_model"]


@dataclass(frozen=True, kw_only=True)
class LayerFindings:
    """What one layer does about position.

    Attributes:
        layer: the layer, from 0.
        rope: whether RoPE acts: removing it changes some score.
        rope_change: the largest change of a score when RoPE is removed, nats.
        rope_pairs: how many rotary pairs turn.
        rope_pairs_acting: how many of them change some score when they alone are not turned.
        rope_base: recovered from the angles; None if they show none.
        rope_pairs_following: how many of the first pairs follow the base; others are slowed down.
        rotary_fraction: of each head's coordinates, the share that turns.
        rope_layout: which coordinates turn together: `halves` or `adjacent`.
        learned_positions_change: the largest change of a score when learned position embeddings are
            replaced by their mean, nats; 0 without them.
        mask: its shape.
        mask_same_in_all_heads: whether all heads have it.
        q_norm, k_norm: whether a norm undoes a scaling of q, or k.
        soft_cap: nats, or None.
        scale: of q.k.
        product_error: by how much scores differ from q.k, scale and soft cap, relative.
    """

    layer: int
    rope: bool
    rope_change: float
    rope_pairs: int
    rope_pairs_acting: int
    rope_base: float | None
    rope_pairs_following: int
    rotary_fraction: float
    rope_layout: str | None
    learned_positions_change: float
    mask: MaskShape
    mask_same_in_all_heads: bool
    q_norm: bool
    k_norm: bool
    soft_cap: float | None
    scale: float
    product_error: float

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as JSON-ready values."""
        return asdict(self)


def probe_layers(
    model: HookedModel, short: Inputs, long: LongInputs | None = None
) -> list[LayerFindings]:
    """Find what each layer does about position.

    Args:
        model: a HookedTransformer or TransformerBridge.
        short: a batch of tokens or vectors, on which all but the mask is found.
        long: one sequence on which the mask is found; the short batch by default.

    Example:
        >>> from nope_probe import load
        >>> model = load("rope-tiny").model
        >>> round(probe_layers(model, torch.arange(48)[None])[1].rope_base)
        10000
    """
    intact = read_layers(model, short)
    entering = [each.residual for each in intact]
    changed = {
        "rope": read_layers(model, short, hooks_without_rope(model, intact), entering),
        "q": read_layers(model, short, hooks_scaling(model, "hook_q", UPSCALED), entering),
        "k": read_layers(model, short, hooks_scaling(model, "hook_k", UPSCALED), entering),
        "learned": read_layers(model, short, hooks_without_learned_positions(model)),
    }
    masks = visible_cells(model, short[:1] if long is None else long)
    return [
        _findings(index, each, {name: some[index] for name, some in changed.items()}, masks[index])
        for index, each in enumerate(intact)
    ]


def _findings(
    index: int,
    intact: LayerReading,
    changed: dict[str, LayerReading],
    visible: Bool[Tensor, "head query_pos key_pos"],
) -> LayerFindings:
    cells = intact.visible.expand_as(intact.scores)
    product = _score_product([intact, changed["q"]], cells)
    change = _largest_change(intact, changed["rope"], cells)
    rotation = recover_rotation(intact.rotation)
    law = power_law(rotation.frequencies) if len(rotation.pairs) else None
    smallest = ACTS * float(intact.scores[cells].abs().max())
    return LayerFindings(
        layer=index,
        rope=change > smallest,
        rope_change=change,
        rope_pairs=len(rotation.pairs),
        rope_pairs_acting=_pairs_acting(
            intact, changed["rope"], rotation, cells, smallest / abs(product.scale)
        ),
        rope_base=law.base if law else None,
        rope_pairs_following=law.n_following if law else 0,
        rotary_fraction=2 * len(rotation.pairs) / intact.q.shape[-1],
        rope_layout=rotation.layout,
        learned_positions_change=_largest_change(intact, changed["learned"], cells),
        mask=mask_shape(visible[0]),
        mask_same_in_all_heads=bool((visible == visible[0]).all()),
        q_norm=_undone(intact, changed["q"], cells),
        k_norm=_undone(intact, changed["k"], cells),
        soft_cap=product.soft_cap,
        scale=product.scale,
        product_error=product.error,
    )


def _largest_change(
    intact: LayerReading,
    changed: LayerReading,
    cells: Bool[Tensor, "batch head query_pos key_pos"],
) -> float:
    return float((changed.scores - intact.scores)[cells].abs().max())


def _undone(
    intact: LayerReading,
    upscaled: LayerReading,
    cells: Bool[Tensor, "batch head query_pos key_pos"],
) -> bool:
    """Return whether scores are those of the intact pass, up to the norm's epsilon."""
    largest = float(intact.scores[cells].abs().max())
    return _largest_change(intact, upscaled, cells) < 0.01 * largest


def _score_product(
    readings: Sequence[LayerReading], cells: Bool[Tensor, "batch head query_pos key_pos"]
) -> ScoreProduct:
    products = torch.cat([each.products[cells] for each in readings])
    return fit_score_product(products, torch.cat([each.scores[cells] for each in readings]))


def _pairs_acting(
    intact: LayerReading,
    unrotated: LayerReading,
    rotation: Rotation,
    cells: Bool[Tensor, "batch head query_pos key_pos"],
    smallest: float,
) -> int:
    """Return how many pairs change q.k by more than `smallest` when they are not turned."""
    count = 0
    for pair in rotation.pairs:
        turned, straight = (
            torch.einsum("bqhd,bkhd->bhqk", each.q[..., pair], each.k[..., pair])
            for each in (intact, unrotated)
        )
        count += bool((turned - straight)[cells].abs().max() > smallest)
    return count
