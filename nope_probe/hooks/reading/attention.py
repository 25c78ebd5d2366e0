"""Each head's attention: its weights, their sums and information, chosen keys, a changed score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.hooks.layers.attention import (
    Attention,
    AttentionMask,
    Scores,
    Visible,
    repeat_heads,
    upcast,
)
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint, hooks_attached
from nope_probe.hooks.layers.model import Given, numbered_layers, skip_keys_of
from nope_probe.hooks.layers.objects import Model
from nope_probe.hooks.layers.passes import read_attention
from nope_probe.hooks.reading.accumulators import Accumulator, Cut, MapAccumulator, stacked_means
from nope_probe.hooks.reading.streaming import Stream, dealt, stream
from nope_probe.maps.folds import FoldSum, State, sum_parts
from nope_probe.maps.maps import AttentionMaps
from nope_probe.maps.rows import RowGroup, choose_rows, rows_of

RowWeights = Float[Tensor, "batch head query_pos which"]
HeadMeasures = Callable[[Attention], Mapping[str, Float[Tensor, "batch head"]]]
ROWS = 128  # queries whose scores are in memory at once
LOWEST = -800  # nats below a row's largest score: its weight is 0 in float64


def capture_attention(
    model: Model,
    inputs: Given,
    *,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    documents: Int[Tensor, " seq"] | None = None,
    query_rows: int | None = None,
    skip_keys: int | None = None,
    keeps_scores: bool = True,
    checkpoint: Stream | None = None,
) -> AttentionMaps:
    """Average the attention weights of each head over sequences, and their information.

    Weights are the softmax of the scores, or what hooks on `hook_pattern` made of it: a learned
    sink outside the scores (as in gpt-oss) takes no part, and what it takes of all attention is
    `sinks`. `analyses.attention.split_attention` splits the information into position and content.

    Args:
        model: in any form that `load` takes in memory, or what it returns, ablated or not.
        inputs: any inputs of `capture_scores`.
        layers: block numbers from 0; all that attend by default. The fold means of all their heads
            stay in memory: 8 bytes a cell.
        batch_size: sequences per forward pass.
        n_folds: into how many parts the sequences are dealt, for intervals; by default 8, or as
            many as there are sequences (documents) if these are fewer.
        documents: the document of each sequence; a document's sequences share a fold.
        query_rows: how many rows (queries) the maps have; see `capture_scores`.
        skip_keys: how many first keys are measured separately; by default 1 for tokens, 0 for
            vectors.
        keeps_scores: whether to average the scores too, of which `unexplained` is made.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Returns:
        Fold means on the CPU.

    Raises:
        UserError: for a layer that the model does not have, or for a token that the model lacks, an
            empty fold, or more rows than positions.

    Example:
        >>> from nope_probe import capture_attention, load
        >>> model = load("parameter-free").model
        >>> capture_attention(model, torch.randn(16, 5, 64), n_folds=4).mean.shape
        torch.Size([4, 1, 5, 5])
    """
    model, inputs, fold_of = dealt(model, inputs, n_folds, documents)
    blocks = numbered_layers(model, layers)
    cut = Cut(
        counts=fold_of.bincount(),
        queries=choose_rows(inputs.shape[1], query_rows),
        skip_keys=skip_keys_of(inputs) if skip_keys is None else skip_keys,
    )
    sums = [AttentionAccumulator(layer, cut, keeps_scores) for layer in blocks]
    stream(model, inputs, sums, fold_of, batch_size, checkpoint)
    return attention_maps(sums)


def attention_maps(sums: Sequence[AttentionAccumulator]) -> AttentionMaps:
    """Return the maps of one or more layers from their sums, which are forgotten."""
    cut, visible = sums[0].cut, torch.stack([of.flags["visible"].cpu() for of in sums])
    return AttentionMaps(
        **stacked_means(sums),
        visible=visible,
        counts=cut.counts,
        layers=tuple(of_layer.layer.index for of_layer in sums),
        skip_keys=cut.skip_keys,
        query_positions=rows_of(visible.shape[-2], cut.queries),
        of_head=None,
    )


class AttentionAccumulator(MapAccumulator):
    """Sums one layer's attention weights and scores per fold and head, at 4 bytes a cell.

    Args:
        layer: the layer.
        cut: the folds, the queries with rows, and the number of first keys.
        keeps_scores: whether to sum the scores too.
    """

    reads_attention = True
    sum_dtype = torch.float32

    def __init__(self, layer: Layer, cut: Cut, keeps_scores: bool = True) -> None:
        super().__init__(layer, cut)
        self.keeps_scores = keeps_scores

    @property
    def groups(self) -> list[RowGroup]:
        """The groups of rows, with all keys if a query sees a later key."""
        groups, n = super().groups, self.flags["visible"].shape[-1]
        looks_ahead = bool(self.flags["looks_ahead"])
        return [replace(group, stop=n) for group in groups] if looks_ahead else groups

    def see(self, mask: AttentionMask) -> None:
        """Keep the cells of the rows that all heads see in the first sequence, later keys too."""
        if "visible" in self.flags:
            return
        visible, keys = mask.rows(self.cut.rows)[0].all(0).clone(), torch.arange(mask.n_keys)
        later = keys > keys[self.cut.rows, None]
        self.flags["visible"] = visible
        self.flags["looks_ahead"] = (visible & later.to(visible.device)).any()

    def read(self, attention: Attention) -> None:
        """Add one batch, a group of rows at a time."""
        if self.already_counted:
            return
        self.see(attention.mask)
        folds = self.fold_of, self.n_folds
        parts: dict[str, list[FoldSum]] = {}
        for group in self.groups:
            scores, visible = scores_of_rows(attention, group)
            if attention.sinks is not None:
                total = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
                share = (attention.sinks[:, None].to(total) - total).sigmoid().double()
                parts[f"sinks{group.name}"] = sum_parts(share, *folds)
            if self.keeps_scores:
                parts[f"scores{group.name}"] = sum_parts(scores, *folds)
            hooked = attention.hooked_weights(group.queries)
            if hooked is None:
                weights, *information = self._measured(scores, visible)
            else:
                weights = hooked[..., : group.stop]
                information = self._information(weights, visible)
            parts[f"weights{group.name}"] = sum_parts(weights, *folds)
            for name, rows in zip(("information", "others"), information, strict=True):
                parts[name + group.name] = sum_parts(rows.double(), *folds)
        self.add(**parts)

    def _measured(self, scores: Scores, visible: Visible) -> tuple[Scores, Tensor, Tensor]:
        """Return weights, KL(A, U) and (1 - a) KL(A', U'), nats; scores are overwritten.

        Sum A ln A is the sum of A times the score, less the logarithm of the softmax's denominator.
        So a row takes one logarithm, not one per cell.
        """
        skipped = self.cut.skip_keys
        logits = scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
        logits = logits.sub_(logits.amax(-1, keepdim=True)).clamp_min_(LOWEST)
        weights = logits.exp()
        total = weights.sum(-1, keepdim=True)
        weights.div_(total)
        log_total = total[..., 0].log()
        of_first = torch.linalg.vecdot(weights[..., :skipped], logits[..., :skipped])
        of_others = torch.linalg.vecdot(weights[..., skipped:], logits[..., skipped:])
        rest = weights[..., skipped:].sum(-1)
        n_keys, n_others = visible.sum(-1), visible[..., skipped:].sum(-1).clamp_min(1)
        information = of_first + of_others - log_total + n_keys.log()
        others = of_others - rest * log_total - torch.special.xlogy(rest, rest)
        return weights, information, others + rest * n_others.log()

    def _information(self, weights: Scores, visible: Visible) -> list[Tensor]:
        """Return KL(A, U) and (1 - a) KL(A', U') of weights that hooks left, nats.

        A row that does not add up to 1 counts as its sum times a row that does.
        """
        information = []
        for skipped in (0, self.cut.skip_keys):
            among, n_keys = weights[..., skipped:], visible[..., skipped:].sum(-1).clamp_min(1)
            total = among.sum(-1)
            terms = torch.special.xlogy(among, among).sum(-1)
            information.append(terms - torch.special.xlogy(total, total / n_keys))
        return information

    def all_means(self) -> dict[str, Float[Tensor, "fold head *map"]]:
        """Return the fold means of weights, information and any scores, and forget the sums."""
        has_sinks = any(name.startswith("sinks") for name in self.totals)
        means = {"weights": self.joined(self.means("weights")).nan_to_num_()}
        if self.keeps_scores:
            means["scores"] = self.joined(self.means("scores"))
        for name in ("information", "others", *["sinks"] * has_sinks):
            means[name] = torch.cat([*self.means(name)], -1)
        if has_sinks:
            means["sinks"] = means["sinks"].mean(-1)
        return means


class HeadSums(Accumulator):
    """Sums measures of one layer's heads over the sequences of each fold.

    Args:
        layer: the layer.
        n_folds: parts of the sequences.
        measure: returns the measures of a batch's attention by name.
    """

    reads_attention = True

    def __init__(self, layer: Layer, n_folds: int, measure: HeadMeasures) -> None:
        super().__init__(n_folds)
        self.layer, self.measure = layer, measure

    def read(self, attention: Attention) -> None:
        """Add one batch."""
        folds, measured = (self.fold_of, self.n_folds), self.measure(attention)
        self.add(**{name: sum_parts(x.double(), *folds) for name, x in measured.items()})


def means_of(sums: Sequence[HeadSums], fold_of: Int[Tensor, " seq"]) -> State:
    """Return the fold means of layers' sums, by measure."""
    counts = fold_of.bincount()[:, None, None]
    return {
        name: torch.stack([of_layer.totals[name].cpu() for of_layer in sums], 1) / counts
        for name in sums[0].totals
    }


def scores_of_rows(attention: Attention, group: RowGroup) -> tuple[Scores, Visible]:
    """Return a copy of the scores of a group of rows, and its visible cells."""
    rows, keys = group.queries, slice(group.stop)
    return upcast(attention.scores(rows, keys)), attention.mask.rows(rows)[..., keys]


def weights_on(attention: Attention, keys: Int[Tensor, "which query_pos"]) -> RowWeights:
    """Return each query's attention to chosen keys, in float32 or better, on the CPU.

    Attention is the softmax of the scores, or what hooks on `hook_pattern` made of it: a learned
    sink outside the scores (as in gpt-oss) is left out. No map of all keys is kept.
    """
    weights = []
    for start in range(0, attention.q.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        hooked = attention.hooked_weights(rows)
        scores = upcast(attention.masked_scores(rows)) if hooked is None else hooked
        where = keys[:, rows].T.to(scores.device).expand(*scores.shape[:3], -1)
        chosen = scores.gather(-1, where)
        if hooked is None:
            chosen = (chosen - scores.logsumexp(-1, keepdim=True)).exp()
        weights.append(chosen)
    return torch.cat(weights, 2).cpu()


def keys_before(n_pos: int, distance: int) -> Int[Tensor, " query_pos"]:
    """Return the key at a distance before each query; 0 for queries without such a key."""
    return (torch.arange(n_pos) - distance).clamp_min(0)


def attended(attention: Attention) -> dict[str, Float[Tensor, "batch head"]]:
    """Return the mean attention of every head to the first key and to the previous token.

    `first_key` is over all queries but the first, which has no other key. A head is a sink head if
    its mean over sequences exceeds 0.3 (Gu et al., arXiv 2410.10781, whose sink score is the share
    of such heads). `previous_token` is at key i - 1, over queries i >= 2: key i - 1 of query 1 is
    the first key. Attention is the softmax of the scores, so a learned sink outside them (as in
    gpt-oss) is left out.
    """
    n_pos = attention.q.shape[1]
    keys = torch.stack((torch.zeros(n_pos, dtype=torch.long), keys_before(n_pos, 1)))
    to_first, to_previous = weights_on(attention, keys).unbind(-1)
    return {
        "first_key": to_first[..., 1:].mean(-1),
        "previous_token": to_previous[..., 2:].mean(-1),
    }


def induction_scores(attention: Attention, n_tokens: int) -> Float[Tensor, "batch head"]:
    """Return the mean attention of every head at key i - (n - 1), over queries of the second copy.

    That key follows the previous occurrence of the query's token.

    Args:
        attention: in n random tokens and their copy, with or without BOS before them.
        n_tokens: n.
    """
    keys = keys_before(attention.q.shape[1], n_tokens - 1)[None]
    return weights_on(attention, keys)[..., -n_tokens:, 0].mean(-1)


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
        with hooks_attached(hooks):
            return [x for x in read_attention(model, text, read) if x is not None]

    def take_out(z: Tensor, hook: HookPoint) -> Tensor:
        left = writing.by_head(z).clone()
        left[0, moved.query, moved.head] -= share.to(left)
        return left.reshape(z.shape)

    share, intact = run([])
    _, without = run([(writing.point("attn.hook_z"), take_out)])
    (weight, score), (weight_without, score_without) = intact.tolist(), without.tolist()
    return ScoreWithout(score - score_without, weight, weight_without)
