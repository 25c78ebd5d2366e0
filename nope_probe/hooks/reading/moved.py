"""One score of a head without what an earlier head moved for it, as later blocks respond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from nope_probe.hooks.layers.attention import Attention, repeat_heads, upcast
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint, hooks_attached
from nope_probe.hooks.layers.model import numbered_layers, read_attention


class Cell(NamedTuple):
    """A query and a key of a head, whose layer and number count from 0."""

    layer: int
    head: int
    query: int
    key: int


class ScoreWithout(NamedTuple):
    """What the score of a cell loses, nats, and its attention weight before and after."""

    effect: float
    weight: float
    weight_without: float


def score_without(
    model: HookedModel, text: Int[Tensor, "1 pos"], cell: Cell, moved: Cell
) -> ScoreWithout:
    """Measure a head's score of a key without what another head moved from one token to another.

    What the other head moved, its weight times the value of its key, is taken out of its output at
    its query. All later blocks respond.

    Args:
        model: in its present state, ablated or not.
        text: one sequence.
        cell: whose score and weight are read.
        moved: of the head that wrote, in an earlier block.
    """
    [writing] = numbered_layers(model, [moved.layer])

    def read(layer: Layer, attention: Attention) -> Tensor | None:
        if layer.index == writing.index:
            weight = attention.pattern(slice(moved.query, moved.query + 1), masked=None)
            values = repeat_heads(attention.v, attention.n_heads)
            return weight[0, moved.head, 0, moved.key] * values[0, moved.key, moved.head]
        if layer.index != cell.layer:
            return None
        row = slice(cell.query, cell.query + 1)
        weights = attention.hooked_weights(row)
        if weights is None:
            weights = upcast(attention.masked_scores(row)).softmax(-1)
        cells = upcast(weights), upcast(attention.scores(row))
        return torch.stack([x[0, cell.head, 0, cell.key] for x in cells])

    def run(hooks: Sequence[Attachment]) -> list[Tensor]:
        with torch.inference_mode(), hooks_attached(hooks):
            readings = read_attention(model, text, read)
        return [x for x in readings if x is not None]

    def take_out(z: Tensor, hook: HookPoint) -> Tensor:
        left = writing.by_head(z).clone()
        left[0, moved.query, moved.head] -= share.to(left)
        return left.reshape(z.shape)

    share, intact = run([])
    _, without = run([(writing.point("attn.hook_z"), take_out)])
    (weight, score), (weight_without, score_without) = intact.tolist(), without.tolist()
    return ScoreWithout(score - score_without, weight, weight_without)
