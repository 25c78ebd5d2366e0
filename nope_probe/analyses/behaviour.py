"""Measures of a model's behaviour, from losses and residual streams.

A loss is a number per document; results are means over documents. A target is a token and its
position in the sequence; the first token has no loss. Losses come as [document, target], in nats;
column t - 1 holds target t. A ridge regression decodes a position's index from the residual stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import (
    Interval,
    Intervals,
    jackknife,
    mean_intervals,
)
from nope_probe.errors import UserError
from nope_probe.maps.estimates import Estimates, fold_weights, leave_one_out

Losses = Float[Tensor, "document target"]
PerDocument = Float[Tensor, " document"]
Loss = TypeVar("Loss", Estimates, Tensor)  # paired: the mean, or a number per document
PENALTY = 1e-3
GROUPS = 64  # of documents, which replicates leave out in turn


def by_document(
    values: Float[Tensor, "seq *rest"], documents: Int[Tensor, " seq"]
) -> Float[Tensor, "document *rest"]:
    """Return the mean over the sequences of each document, in the order of the documents' numbers.

    Example:
        >>> by_document(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([7, 2, 7]))
        tensor([5., 2.])
    """
    unique, place = documents.unique(return_inverse=True)
    sums = values.new_zeros(len(unique), *values.shape[1:]).index_add_(0, place, values)
    counts = torch.bincount(place).to(values.dtype)
    return sums / counts.view(-1, *[1] * (values.ndim - 1))


def mean_interval(values: PerDocument) -> Interval:
    """Return the mean over documents with its 95% jackknife interval.

    Its replicates are without each group of documents in turn; see `in_groups`.

    Raises:
        UserError: for fewer than 4 documents.
    """
    interval = jackknife(Estimates.of_means(values.double()))
    return replace(interval, replicates=Estimates.of_means(*in_groups(values.double())))


def in_groups(
    values: Float[Tensor, "document *rest"],
) -> tuple[Float[Tensor, "group *rest"], Float[Tensor, " group"]]:
    """Return the means of groups of documents, and the share of all documents in each group.

    Documents are dealt to 64 groups in turn; up to 64 documents are a group each.

    Example:
        >>> means, weights = in_groups(torch.arange(65.0))
        >>> len(means), float(means[0]), float(weights[0])
        (64, 32.0, 0.03076923076923077)
    """
    documents = torch.arange(len(values)) % GROUPS
    return by_document(values, documents), fold_weights(GROUPS, documents.bincount())


def cost_of(changed: Loss, intact: Loss, null: Loss | None = None) -> dict[str, Loss]:
    """Return what a removal costs, and the two parts of a cost that is less the null's, nats.

    To take means of texts out costs for their noise too, as the null does, so `cost` is
    `cost_with_noise` less `cost_null`.

    Args:
        changed: the losses in the condition, paired with those of the other models.
        intact: those of the intact model.
        null: those of the null, where something was estimated on the texts.
    """
    rise = changed - intact
    if null is None:
        return {"cost": rise}
    return {"cost": changed - null, "cost_with_noise": rise, "cost_null": null - intact}


def position_means(losses: Losses) -> Intervals:
    """Return the mean loss at each target, nats, with its jackknife interval over documents.

    A single document gives no interval.
    """
    intervals = mean_intervals(losses, fold_weights(len(losses)))
    groups, weights = in_groups(losses.double())
    return replace(intervals, replicates=leave_one_out(groups, weights), weights=weights)


def span_loss(losses: Losses, first: int, stop: int | None = None) -> PerDocument:
    """Return each document's mean loss of the targets first, ..., stop - 1 (to the end for None).

    Raises:
        UserError: if there are no such targets.
    """
    columns = losses[:, max(first, 1) - 1 : None if stop is None else stop - 1]
    if columns.shape[1] == 0:
        raise UserError(f"no targets from {first} to {stop} in {losses.shape[1] + 1} tokens")
    return columns.mean(1)


def binned_means(losses: Losses, first: int, width: int = 1) -> tuple[list[int], Intervals]:
    """Return the mean losses of bins of positions, nats, and the first position of each bin.

    Args:
        losses: of documents, by target.
        first: the first position, which may cut its bin.
        width: positions in a bin.
    """
    starts = [first, *range(first + width - first % width, losses.shape[1] + 1, width)]
    stops = [*starts[1:], losses.shape[1] + 1]
    spans = [span_loss(losses, *ends) for ends in zip(starts, stops, strict=True)]
    return starts, position_means(torch.stack(spans, 1))


def parts_of(
    n_pos: int, *, prefix: int = 1, segment: int = 1, trained: int = 1
) -> dict[str, tuple[int, int]]:
    """Return the parts of a window whose losses are compared: the first target, and the one after.

    The sources of `early` and `late` take single tokens, the 50th and the 500th (arXiv 2209.11895).
    A copy's first token is left out, because a model cannot know yet that the copy begins.

    Args:
        n_pos: tokens in a window.
        prefix: the first target after the prefix.
        segment: the length of the segment that is copied; windows end in it twice.
        trained: the trained context, in tokens; windows are longer.

    Example:
        >>> parts = parts_of(43)  # a tenth is 4
        >>> parts["early"], parts["late"]
        ((4, 8), (39, 43))
    """
    tenth = n_pos // 10
    return {
        "all": (1, n_pos),
        "after_bos": (2, n_pos),
        "suffix": (prefix, n_pos),
        "early": (tenth, 2 * tenth),
        "late": (n_pos - tenth, n_pos),
        "first_copy": (n_pos - 2 * segment + 1, n_pos - segment),
        "second_copy": (n_pos - segment + 1, n_pos),
        "trained": (trained - trained // 4, trained),
        "beyond": (trained, n_pos),
    }


def ridge(
    xx: Float[Tensor, "*batch row row"],
    xy: Float[Tensor, "*batch row target"],
    penalty: float = PENALTY,
) -> Float[Tensor, "*batch row target"]:
    """Return the weights of ridge regressions with a constant, which is not penalised.

    Columns are standardised: the result minimises |y - Xw - b|^2 / n + penalty * sum (s_j w_j)^2,
    where s_j is the standard deviation of column j, so it does not depend on the columns' units.

    Args:
        xx: X'X, where X has a last column of ones: its last cell is n.
        xy: X'y.
        penalty: the penalty on the weight of a standardised column.

    Returns:
        w, and b as last row.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
        >>> ridge(x.T @ x, x.T @ (3 * x[:, :1] + 5), penalty=0.0).flatten().round(decimals=3)
        tensor([3., 5.], dtype=torch.float64)
    """
    xx, xy = xx.double(), xy.double()
    n = xx[..., -1:, -1:]
    mean_x, mean_y = xx[..., :-1, -1:] / n, xy[..., -1:, :] / n
    cov_xx = xx[..., :-1, :-1] / n - mean_x * mean_x.mT
    cov_xy = xy[..., :-1, :] / n - mean_x * mean_y
    variance = cov_xx.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    # A constant column has no variance; its weight is 0 for any number added here.
    added = torch.where(variance > 0, penalty * variance, 1.0)
    w = torch.linalg.solve(cov_xx + torch.diag_embed(added), cov_xy)
    return torch.cat([w, mean_y - mean_x.mT @ w], -2)


def chance_distance(seq_len: int, skip: int) -> float:
    """Return the mean distance of all indices from the middle index: the best constant prediction.

    Example:
        >>> chance_distance(5, 0), chance_distance(5, 1)
        (1.2, 1.0)
    """
    index = torch.arange(skip, seq_len, dtype=torch.float64)
    return float((index - index.mean()).abs().mean())
