"""Which heads need a component: what their attention on the same inputs is without it.

The tap shows the queries and keys of a pass, so that both rows of scores, with the component and
without it, come from one pass of the intact model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.ablation import BlockAblation
from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel, hooks_in_place
from nope_probe.hooks.layers.model import Given, Inputs, numbered_layers, tapped
from nope_probe.hooks.layers.objects import Model
from nope_probe.hooks.layers.passes import read_attention
from nope_probe.hooks.reading.attention import HeadSums, means_of, scores_of_rows
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.streaming import Stream, dealt, stream
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import CONSTANT_OUTPUTS, Ablation
from nope_probe.hooks.removing.written import ABLATED
from nope_probe.maps.folds import TensorRecord, pooled
from nope_probe.maps.maps import cells_frame
from nope_probe.maps.rows import GROUP_ROWS, RowGroup
from nope_probe.removal import validate_components

# What changes a head's attention and nothing that the head reads. Without a sink, KL is infinite.
IN_ATTENTION = ("mask", "window", "rope", "alibi", "w_q", "w_k")
Edit = Callable[[Attention], Attention]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Needs(TensorRecord):
    """The need of every head for what was removed, in nats.

    Attributes:
        folds: fold means.
        counts: sequences per fold.
        layers: the number of each layer's block.
    """

    folds: Float[Tensor, "fold layer head"]
    counts: Int[Tensor, " fold"]
    layers: tuple[int, ...]

    def __repr__(self) -> str:
        """Return sizes, and the head with the largest need."""
        mean, n_heads = self.mean, self.folds.shape[-1]
        place, head = divmod(int(mean.argmax()), n_heads)
        return (
            f"Needs of {len(self.layers)} layers of {n_heads} heads, the largest that of "
            f"L{self.layers[place]}H{head}: {mean.max():.3g} nats\n"
            f"means over {int(self.counts.sum())} sequences in {len(self.counts)} folds"
        )

    @property
    def mean(self) -> Float[Tensor, "layer head"]:
        """The mean over all sequences."""
        return pooled(self.folds, self.counts)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each layer and head: the need, nats."""
        return cells_frame("need", self.mean, layer=self.layers, head=range(self.folds.shape[-1]))


def capture_need(
    model: Model,
    inputs: Given,
    removed: Ablation | Sequence[str] | str,
    *,
    batch_size: int = 32,
    n_folds: int | None = None,
    documents: Int[Tensor, " seq"] | None = None,
    checkpoint: Stream | None = None,
) -> Needs:
    """Measure how much each head's attention needs a component: KL(A || A(c)), nats.

    A is a head's attention to the keys that a query sees, A(c) its attention on the same inputs
    without the component in this head alone. A learned sink counts as one more key. The need is
    the mean over sequences and queries. It says where the component changes attention, not what
    the model needs it for: that is the cost of the removal.

    Args:
        model: in any form that `load` takes in memory, or what it returns, intact.
        inputs: any inputs of `capture_scores`.
        removed: the mask, the window, RoPE or a band of it, ALiBi, W_Q or W_K, or several at once;
            names are short for `Ablation(remove=...)`. The mean output of W_Q or W_K is measured on
            the inputs first.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals; by default 8, or as
            many as there are sequences (documents) if these are fewer.
        documents: the document of each sequence; a document's sequences share a fold.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Raises:
        UserError: for a component that the model lacks or that no single head's attention can lose,
            for heads (every head is measured) or a replacement whose output is not constant, or
            inside `ablated` on this model.
        NotImplementedError: for scores that hooks change.

    Example:
        >>> from nope_probe import capture_need, load
        >>> need = capture_need(load("rope-tiny").model, torch.randint(9, (8, 7)), "rope")
        >>> need.mean.shape
        torch.Size([4, 4])
    """
    ablation = Ablation.of(removed)
    model, inputs, fold_of = dealt(model, inputs, n_folds, documents)
    _validate(model, ablation)
    layers, counts = numbered_layers(model, ablation.layers), fold_of.bincount()
    edits = _edits(model, inputs, ablation, layers, batch_size)
    sums = [
        HeadSums(layer, len(counts), partial(need_of, layer, edits[layer.index]))
        for layer in layers
    ]
    stream(model, inputs, sums, fold_of, batch_size, checkpoint)
    numbers = tuple(layer.index for layer in layers)
    return Needs(folds=means_of(sums, fold_of)["need"], counts=counts, layers=numbers)


def _validate(model: HookedModel, ablation: Ablation) -> None:
    if model in ABLATED:
        raise UserError("the model is ablated: capture need before `ablated`")
    condition = ablation.condition
    others = [name for name in condition.ordered if name.kind not in IN_ATTENTION]
    if others or not condition:
        raise UserError(
            f"need is of what a head's attention can lose: {', '.join(IN_ATTENTION)}, or a band of "
            f"rope, not {others[0] if others else 'nothing'}"
        )
    if ablation.heads is not None:
        raise UserError("need is measured in every head alone: name layers, or neither")
    if condition.weights and ablation.replacement not in CONSTANT_OUTPUTS:
        raise UserError(
            f"need of {condition.weights[0]} takes a constant in its place: replacement='mean'"
        )
    validate_components(condition, components(model))


def _edits(
    model: HookedModel, inputs: Inputs, ablation: Ablation, layers: Sequence[Layer], batch_size: int
) -> dict[int, Edit]:
    """Return by block the function that removes the components from each of its heads."""
    # In heads by name: only then are q and k edited where they are multiplied.
    blocks = {
        layer.index: BlockAblation(model, layer, [*range(layer.n_heads)], ablation)
        for layer in layers
    }
    weights = ablation.condition.weights
    if not weights:
        return {index: block.edit for index, block in blocks.items()}
    calibration = calibrate(model, inputs, batch_size=batch_size)

    def read(layer: Layer, attention: Attention) -> tuple[int, dict[str, Tensor]]:
        return layer.index, {"w_q": attention.q, "w_k": attention.k}

    # A constant is normed and rotated by the model, alike in all sequences of a length.
    hooks = [hook for block in blocks.values() for hook in block.hooks(calibration)]
    with tapped(model), hooks_in_place(hooks):
        constants = dict(read_attention(model, inputs[:1], read))

    def edit(index: int, attention: Attention) -> Attention:
        vectors = {"w_q": attention.q, "w_k": attention.k}
        for name in weights:
            vectors[name] = constants[index][name].expand(len(attention.q), -1, -1, -1)
        return blocks[index].edit(replace(attention, q=vectors["w_q"], k=vectors["w_k"]))

    return {index: partial(edit, index) for index in blocks}


def need_of(
    layer: Layer, edit: Edit, attention: Attention
) -> dict[str, Float[Tensor, "batch head"]]:
    """Return the need of a layer's heads in each sequence, nats, a group of rows at a time.

    Args:
        layer: the layer.
        edit: returns attention without the component.
        attention: of a batch.

    Raises:
        NotImplementedError: for scores or a pattern that hooks change.
    """
    if attention.hooked is not None or attention.hooked_pattern is not None:
        raise NotImplementedError(
            f"hooks change the attention of L{layer.index}: no second row is known"
        )
    changed, n = edit(attention), attention.mask.n_queries
    need = attention.q.new_zeros(*attention.q.shape[:1], attention.n_heads).double()
    for rows in torch.arange(n).split(GROUP_ROWS):
        seen = changed.mask.rows(rows).flatten(0, -2).any(0).nonzero()
        group = RowGroup(name="", queries=rows, stop=int(seen.max()) + 1)
        need += divergence(attention, changed, group).sum(-1, dtype=torch.float64)
    return {"need": need / n}


def divergence(
    attention: Attention, changed: Attention, group: RowGroup
) -> Float[Tensor, "batch head row"]:
    """Return KL(A || A') of the rows of two attentions, nats, where A' sees what A sees, or more.

    Args:
        attention: A.
        changed: A'.
        group: the rows.
    """
    rows = []
    for of in (attention, changed):
        scores, visible = scores_of_rows(of, group)
        scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
        total = scores.logsumexp(-1)
        if of.sinks is not None:
            total = total.logaddexp(of.sinks[:, None].to(total))
        rows.append((scores, total))
    (scores, total), (new, new_total) = rows
    weights = (scores - total[..., None]).exp_()
    return torch.linalg.vecdot(weights, scores.sub_(new)) - total + new_total
