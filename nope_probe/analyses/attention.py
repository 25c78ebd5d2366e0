"""How much of a head's attention is position: the same in every text, or different in each.

For the weights A of a query over n keys, with a on the first key and A' on the other keys,
KL(A, U) = KLb(a, 1/n) + (1 - a) KL(A', U'): whether to look at the first key, and where to look
among the other keys. Over texts each of the two is the same of the mean weights (position) plus
the rest (content), which is the mutual information between the text and the attended key.

The mean weights M of N texts have too much position. The texts of a fold, read with the mean
weights of the other folds, have too little: E A log(M / U) is at most KL(E A, U), by Gibbs'
inequality. The gap between these two bounds falls about as 1/N, and so does the error of the
jackknife's estimate, which lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, ByLayer, Interval, jackknife, share
from nope_probe.analyses.pattern import MIN_KEYS
from nope_probe.errors import UserError, kind_of
from nope_probe.maps.estimates import (
    Estimates,
    fold_weights,
    leave_one_out,
    weights_of_means,
)
from nope_probe.maps.maps import AttentionMaps
from nope_probe.maps.rows import BLOCK_BYTES

LARGEST_GAP = 0.5  # of the bounds of a share that is given
LOWERED = 1 / 8  # of the gap: how far the lower end of an interval is lowered
GAP_TO_REACH = 0.25  # with the number of sequences that a note asks for
PartValues = Float[Tensor, "*head part one_plus_folds"]  # of each part on all folds, then without
Gaps = Float[Tensor, "*head two"]  # of the bounds of position: first key, other keys
PARTS = (  # of an `AttentionSplit`, in nats, and the weight; `_head_parts` has this order
    "information",
    "first_position",
    "first_content",
    "others_position",
    "others_content",
    "first_weight",
    "unexplained",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSplit:
    """The information of a head's attention above uniform attention, in four parts, in nats.

    Parts are means over the queries that see 8 keys or more. The bias of a mean of N texts is
    removed, so noise can make a part of 0 negative. As this bias is known from the same texts, the
    gap of the bounds widens intervals: position may be less, by an eighth of the gap.

    Attributes:
        information: E KL(A, U).
        first_position: whether to look at the first key, the same in every text.
        first_content: whether to look at the first key, differing from text to text.
        others_position: where to look among the other keys, the same in every text.
        others_content: where to look among the other keys, differing from text to text.
        positional_share: the share of position in the information, 0 to 1; undefined if its bounds
            differ by more than 50 points.
        others_share: the same share among the other keys alone.
        first_weight: the mean weight of the first key, 0 to 1.
        unexplained: `others_position` that the softmax of the mean scores misses: the divergence
            of the mean weights from it; NaN if the maps have no scores.
        pattern_missed: the share of it in `others_position`; undefined if that does not exceed its
            noise.
        positional_share_gap, others_share_gap: the upper less the lower bound of these shares, 0.5
            for 50 points.
    """

    information: Interval
    first_position: Interval
    first_content: Interval
    others_position: Interval
    others_content: Interval
    positional_share: Interval
    others_share: Interval
    first_weight: Interval
    unexplained: Interval
    pattern_missed: Interval
    positional_share_gap: float
    others_share_gap: float

    @classmethod
    def of(cls, values: PartValues, weights: Float[Tensor, " fold"], gaps: Gaps) -> AttentionSplit:
        """Return the split of the values of `PARTS`, with the share of sequences of each fold."""
        parts = {
            name: Estimates(values=of_part, weights=weights)
            for name, of_part in zip(PARTS, values, strict=True)
        }
        information, others = parts["information"], parts["others_position"]
        among = others + parts["others_content"]
        first_gap, others_gap = gaps.tolist()
        gap = float((first_gap + others_gap) / information.values[0])
        among_gap = float(others_gap / among.values[0])
        intervals = {name: jackknife(part) for name, part in parts.items()}
        for keys, of_bounds in (("first", first_gap), ("others", others_gap)):
            position, content = f"{keys}_position", f"{keys}_content"
            low = intervals[position].low - LOWERED * of_bounds
            high = intervals[content].high + LOWERED * of_bounds
            intervals[position] = replace(intervals[position], low=low)
            intervals[content] = replace(intervals[content], high=high)
        return cls(
            **intervals,
            positional_share=_between_bounds(
                share(parts["first_position"] + others, information), gap
            ),
            others_share=_between_bounds(share(others, among), among_gap),
            pattern_missed=share(parts["unexplained"], others),
            positional_share_gap=gap,
            others_share_gap=among_gap,
        )

    def rows(self) -> Iterable[tuple[dict[str, str], Mapping[str, Interval]]]:
        """Yield the one row of a table, of which the layer and head are all that name it."""
        values = {name: of for name, of in vars(self).items() if isinstance(of, Interval)}
        values.pop("unexplained")
        yield {}, values


def _between_bounds(interval: Interval, gap: float) -> Interval:
    """Return a share's interval with a lower end that allows for the gap between its bounds."""
    if gap > LARGEST_GAP:
        return UNDEFINED
    return replace(interval, low=interval.low - LOWERED * gap)


class PositionalParts(NamedTuple):
    """The information in position at each query, in nats, and the weight of the first key."""

    first: Float[Tensor, "*batch row"]
    others: Float[Tensor, "*batch row"]
    first_weight: Float[Tensor, "*batch row"]


def information_parts(
    weights: Float[Tensor, "*batch row key_pos"],
    visible: Bool[Tensor, "row key_pos"],
    skip_keys: int = 1,
) -> PositionalParts:
    """Return KLb(a, 1/n) and (1 - a) KL(A', U') of weights A, in nats, and a.

    They add up to KL(A, U). With several first keys, the first part includes where to look among
    them; without a first key it is 0.

    Args:
        weights: attention weights, 0 outside the visible cells.
        visible: the keys that each query sees.
        skip_keys: how many first keys are measured separately.

    Example:
        >>> weights = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).double()
        >>> parts = information_parts(weights, torch.ones(1, 4).bool())
        >>> [round(float(part), 3) for part in parts]
        [0.144, 0.203, 0.5]
    """
    first, others = weights[..., :skip_keys], weights[..., skip_keys:]
    n_keys, n_others = visible.sum(-1), visible[..., skip_keys:].sum(-1).clamp_min(1)
    rest = others.sum(-1)
    shared = torch.special.xlogy(rest, rest)
    among_others = _xlogx(others) - shared + rest * n_others.to(rest).log()
    total = first.sum(-1) + rest
    whole = total * n_keys.clamp_min(1).to(rest).log()
    at_first = _xlogx(first) + shared + whole - rest * n_others.to(rest).log()
    return PositionalParts(first=at_first, others=among_others, first_weight=first.sum(-1))


def _xlogx(weights: Float[Tensor, "*batch key_pos"]) -> Float[Tensor, "*batch"]:
    return torch.special.xlogy(weights, weights).sum(-1)


def relative_entropy(
    weights: Float[Tensor, "*batch key_pos"], expected: Float[Tensor, "*batch key_pos"]
) -> Float[Tensor, " *batch"]:
    """Return KL(A || M) of attention weights to mean weights, nats, float64.

    A mean weight below the smallest number of float32 counts as that number.

    Example:
        >>> relative_entropy(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
        tensor(0.1438, dtype=torch.float64)
    """
    least = torch.finfo(torch.float32).tiny
    logarithms = expected.double().clamp_min(least).log()
    return _xlogx(weights.double()) - (weights.double() * logarithms).sum(-1)


def split_attention(maps: AttentionMaps) -> ByLayer[tuple[int, int], AttentionSplit]:
    """Return the four parts of each head's attention by layer and head.

    Raises:
        UserError: for fewer than 4 folds, or what are no maps of `capture_attention`.

    Example:
        >>> from nope_probe import capture_attention, load, sequences
        >>> loaded = load("rope-tiny", n_layers=2)
        >>> data = sequences(tokenizer=loaded.tokenizer, n_seqs=64)
        >>> heads = split_attention(capture_attention(loaded.model, data, layers=[1]))
        >>> heads[1, 3].positional_share.value > 0.9
        True
    """
    if not isinstance(maps, AttentionMaps):
        raise UserError(f"expected maps of `capture_attention`, got {kind_of(maps)}")
    return splits_of(*split_parts(maps), maps.counts, [*product(maps.layers, maps.heads)])


def splits_of(
    values: PartValues,
    gaps: Gaps,
    counts: Int[Tensor, " fold"],
    heads: Sequence[tuple[int, int]],
) -> ByLayer[tuple[int, int], AttentionSplit]:
    """Return the four parts of each head's attention by layer and head; see `split_parts`.

    Args:
        values: of `PARTS`, by layer and head.
        gaps: of the bounds.
        counts: sequences per fold.
        heads: the layer and number of each.
    """
    weights = fold_weights(len(counts), counts)
    of_heads = zip(heads, values.flatten(0, 1), gaps.flatten(0, 1), strict=True)
    return ByLayer({head: AttentionSplit.of(of, weights, gap) for head, of, gap in of_heads})


def split_parts(maps: AttentionMaps) -> tuple[PartValues, Gaps]:
    """Return the estimates of `PARTS` of every head, and the gaps of their bounds, nats.

    `splits_of` makes the heads' splits of them.
    """
    n_layers, n_heads = maps.weights.shape[1:3]
    heads = [_head_parts(maps, *place) for place in product(range(n_layers), range(n_heads))]
    values, gaps = (torch.stack(of) for of in zip(*heads, strict=True))
    return values.unflatten(0, (n_layers, n_heads)), gaps.unflatten(0, (n_layers, n_heads))


def _head_parts(maps: AttentionMaps, place: int, head: int) -> tuple[PartValues, Gaps]:
    """Return the estimates of the parts of one head, in the layer at a place of the maps."""
    n_folds, share_of = len(maps.counts), fold_weights(len(maps.counts), maps.counts)
    weights, visible, skip_keys = maps.weights[:, place, head], maps.visible[place], maps.skip_keys
    kept, of_means = visible.sum(-1) >= MIN_KEYS, weights_of_means(share_of)
    size = max(1, BLOCK_BYTES // (8 * len(of_means) * visible.shape[-1]))
    sums, gap = torch.zeros(3, len(of_means)).double(), torch.zeros(2).double()
    for rows in kept.nonzero().flatten().split(size):
        of_folds = weights[:, rows].double()
        mean = torch.einsum("mf,frk->mrk", of_means, of_folds)
        at_first, among_others, _ = information_parts(mean, visible[rows], skip_keys)
        lower = _lower_bounds(of_folds, mean[1 : n_folds + 1], share_of, visible[rows], skip_keys)
        gap += (torch.stack((at_first[0], among_others[0])) - lower).sum(-1)
        missed = torch.full_like(at_first, torch.nan)
        if maps.scores is not None:
            scores = maps.scores[:, place, head, rows].double()
            mean_scores = torch.einsum("mf,frk->mrk", of_means, scores)
            missed = _divergence(*(x[..., skip_keys:] for x in (mean, mean_scores, visible[rows])))
        sums += torch.stack((at_first, among_others, missed)).sum(-1)
    first, others, missed = (
        Estimates.without_bias(values, share_of).values for values in sums / kept.sum()
    )
    means = (maps.information[:, place, head], maps.others[:, place, head])
    whole, among, first_weight = (
        leave_one_out(mean[:, kept].double().mean(1), share_of)
        for mean in (*means, weights[..., :skip_keys].sum(-1))
    )
    parts = whole, first, whole - among - first, others, among - others, first_weight, missed
    return torch.stack(parts), gap / kept.sum()


def _lower_bounds(
    weights: Float[Tensor, "fold row key_pos"],
    of_other_folds: Float[Tensor, "fold row key_pos"],
    share_of: Float[Tensor, " fold"],
    visible: Bool[Tensor, "row key_pos"],
    skip_keys: int,
) -> Float[Tensor, "two row"]:
    """Return lower bounds of position about the first key and among the other keys, nats.

    The bound of both is E A log(M / U), where the mean M leaves out the text's fold. Among the
    other keys it is E (1 - a) A' log(M' / U').

    Args:
        weights: fold means of the weights A.
        of_other_folds: for each fold the mean M of the weights in the other folds.
        share_of: the share of all sequences that each fold holds.
        visible: the keys that each query sees.
        skip_keys: how many first keys are measured separately.
    """
    least = torch.finfo(torch.float32).tiny
    logs = of_other_folds.clamp_min(least).log()
    others, seen = weights[..., skip_keys:], visible[..., skip_keys:]
    rest, n_others = others.sum(-1), seen.sum(-1).clamp_min(1).to(weights).log()
    read = (others * logs[..., skip_keys:]).sum(-1)
    log_rest = of_other_folds[..., skip_keys:].sum(-1).clamp_min(least).log()
    among = read + rest * (n_others - log_rest)
    both = (weights * logs).sum(-1) + weights.sum(-1) * visible.sum(-1).to(weights).log()
    return torch.einsum("f,pfr->pr", share_of, torch.stack((both - among, among)))


def _divergence(
    weights: Float[Tensor, "*batch row key_pos"],
    scores: Float[Tensor, "*batch row key_pos"],
    visible: Bool[Tensor, "row key_pos"],
) -> Float[Tensor, "*batch row"]:
    """Return (1 - m) KL(M', softmax of scores) among the other keys, nats.

    Args:
        weights: mean weights of the other keys; 1 - m is their sum.
        scores: mean scores of the other keys, nats.
        visible: which of them each query sees.
    """
    logits = scores.masked_fill(~visible, -torch.inf).log_softmax(-1)
    rest = weights.sum(-1)
    expected = (weights * logits.masked_fill(~visible, 0)).sum(-1)
    return _xlogx(weights) - torch.special.xlogy(rest, rest) - expected
