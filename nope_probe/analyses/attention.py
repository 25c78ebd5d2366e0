"""How much of a head's attention is position: the same in every text, or different in each.

For the weights A of a query over n keys, with a on the first key and A' on the other keys,
KL(A, U) = KLb(a, 1/n) + (1 - a) KL(A', U'): whether to look at the first key, and where to look
among the other keys. Over texts each of the two is the same of the mean weights (position) plus
the rest (content), which is the mutual information between the text and the attended key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, share
from nope_probe.analyses.pattern import MIN_KEYS
from nope_probe.errors import UserError, kind_of
from nope_probe.maps.estimates import Estimates, fold_weights, weights_of_means
from nope_probe.maps.maps import AttentionMaps
from nope_probe.maps.rows import BLOCK_BYTES

Values = Float[Tensor, " one_plus_folds"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSplit:
    """The information of a head's attention above uniform attention, in four parts, in nats.

    Parts are means over the queries that see 8 keys or more. The bias of a mean of N texts is
    removed, so noise can make a part of 0 negative.

    Attributes:
        information: E KL(A, U).
        first_position: whether to look at the first key, the same in every text.
        first_content: whether to look at the first key, differing from text to text.
        others_position: where to look among the other keys, the same in every text.
        others_content: where to look among the other keys, differing from text to text.
        first_weight: the mean weight of the first key, 0 to 1.
        unexplained: `others_position` that the softmax of the mean scores misses: the divergence
            of the mean weights from it; NaN if the maps have no scores.
    """

    information: Estimates
    first_position: Estimates
    first_content: Estimates
    others_position: Estimates
    others_content: Estimates
    first_weight: Estimates
    unexplained: Estimates

    @property
    def positional_share(self) -> Interval:
        """The share of position in the information among the other keys, 0 to 1."""
        return share(self.others_position, self.others_position + self.others_content)

    @property
    def pattern_missed(self) -> Interval:
        """The share of `others_position` that the softmax of the mean scores misses.

        Undefined if `others_position` does not exceed its noise.
        """
        return share(self.unexplained, self.others_position)


class Parts(NamedTuple):
    """What position tells at each query, in nats, and the weight of the first key."""

    first: Float[Tensor, "*batch row"]
    others: Float[Tensor, "*batch row"]
    first_weight: Float[Tensor, "*batch row"]


def information_parts(
    weights: Float[Tensor, "*batch row key_pos"],
    visible: Bool[Tensor, "row key_pos"],
    skip_keys: int = 1,
) -> Parts:
    """Return KLb(a, 1/n) and (1 - a) KL(A', U') of weights A, in nats, and a.

    They add up to KL(A, U). With several first keys, the first part also tells where to look among
    them; without a first key it is 0.

    Args:
        weights: attention weights, 0 outside the visible cells.
        visible: the keys that each query sees.
        skip_keys: how many first keys stand apart.

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
    return Parts(first=at_first, others=among_others, first_weight=first.sum(-1))


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


def split_attention(maps: AttentionMaps) -> dict[tuple[int, int], AttentionSplit]:
    """Return the four parts of each head's attention by layer and head.

    Raises:
        ValueError: for fewer than 3 folds, or what are no maps of `capture_attention`.

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
    return {
        (layer, head): split_head(maps, place, head)
        for place, layer in enumerate(maps.layers)
        for head in range(maps.weights.shape[2])
    }


def split_head(maps: AttentionMaps, place: int, head: int) -> AttentionSplit:
    """Return the four parts of the attention of one head, in the layer at a place of the maps.

    Raises:
        ValueError: for fewer than 3 folds.
    """
    n_folds, share_of = len(maps.counts), fold_weights(len(maps.counts), maps.counts)
    if n_folds < 3:
        raise ValueError(f"expected at least 3 folds to leave two out, got {n_folds}")
    weights, visible, skip_keys = maps.weights[:, place, head], maps.visible[place], maps.skip_keys
    kept, of_means = visible.sum(-1) >= MIN_KEYS, weights_of_means(share_of)
    size = max(1, BLOCK_BYTES // (8 * len(of_means) * visible.shape[-1]))
    parts = []
    for rows in kept.nonzero().flatten().split(size):
        mean = torch.einsum("mf,frk->mrk", of_means, weights[:, rows].double())
        at_first, among_others, _ = information_parts(mean, visible[rows], skip_keys)
        missed = torch.full_like(at_first, torch.nan)
        if maps.scores is not None:
            scores = maps.scores[:, place, head, rows].double()
            mean_scores = torch.einsum("mf,frk->mrk", of_means, scores)
            missed = _divergence(mean, mean_scores, visible[rows], skip_keys)
        parts.append(torch.stack((at_first, among_others, missed)).sum(-1))
    sums = torch.stack(parts).sum(0) if parts else torch.full((3, len(of_means)), torch.nan)
    first_position, others_position, unexplained = (
        Estimates.without_bias(values, share_of) for values in sums.double() / kept.sum()
    )

    def mean_of(folds: Float[Tensor, "fold row"]) -> Estimates:
        return Estimates.of_means(folds[:, kept].double().mean(1), share_of)

    whole, among = (mean_of(x[:, place, head]) for x in (maps.information, maps.others))
    return AttentionSplit(
        information=whole,
        first_position=first_position,
        first_content=whole - among - first_position,
        others_position=others_position,
        others_content=among - others_position,
        first_weight=mean_of(weights[..., :skip_keys].sum(-1)),
        unexplained=unexplained,
    )


def _divergence(
    weights: Float[Tensor, "*batch row key_pos"],
    scores: Float[Tensor, "*batch row key_pos"],
    visible: Bool[Tensor, "row key_pos"],
    skip_keys: int,
) -> Float[Tensor, "*batch row"]:
    """Return (1 - m) KL(M', softmax of scores) among the other keys, nats."""
    cells, others = visible[..., skip_keys:], weights[..., skip_keys:]
    logits = scores[..., skip_keys:].masked_fill(~cells, -torch.inf).log_softmax(-1)
    rest = others.sum(-1)
    expected = (others * logits.masked_fill(~cells, 0)).sum(-1)
    return _xlogx(others) - torch.special.xlogy(rest, rest) - expected
