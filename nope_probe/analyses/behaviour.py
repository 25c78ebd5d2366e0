"""What losses say of a model's behaviour: one number per document, and their mean over documents.

A target is a token with the position that it has in its sequence; the first token has no loss.
Losses come as [document, target], in nats, column t - 1 holding target t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, jackknife, leave_one_out, standard_error

Losses = Float[Tensor, "document target"]
PerDocument = Float[Tensor, " document"]


@dataclass(frozen=True, kw_only=True)
class PositionMeans:
    """The mean over documents at each target, with its 95% interval, in nats."""

    value: Float[Tensor, " target"]
    low: Float[Tensor, " target"]
    high: Float[Tensor, " target"]


def by_document(
    values: Float[Tensor, "seq *rest"], documents: Int[Tensor, " seq"]
) -> Float[Tensor, "document *rest"]:
    """Return the mean over the sequences of each document, in the order of the documents' numbers.

    Example:
        >>> by_document(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([7, 2, 7]))
        tensor([5., 2.])
    """
    found, place = documents.unique(return_inverse=True)
    sums = values.new_zeros(len(found), *values.shape[1:]).index_add_(0, place, values)
    counts = torch.bincount(place).to(values.dtype)
    return sums / counts.view(-1, *[1] * (values.ndim - 1))


def mean_interval(values: PerDocument) -> Interval:
    """Return the mean over documents with its 95% jackknife interval.

    Raises:
        ValueError: for fewer than 4 documents.
    """
    return jackknife(leave_one_out(values.double()))


def position_means(losses: Losses) -> PositionMeans:
    """Return the mean loss at each target, with its jackknife interval over documents.

    The jackknife of a mean over n documents is t_{n-1}(.975) standard errors to either side, which
    one document does not have.
    """
    from scipy.special import stdtrit

    losses = losses.double()
    n = len(losses)
    half = float(stdtrit(n - 1, 0.975)) * standard_error(losses)
    value = losses.mean(0)
    return PositionMeans(value=value, low=value - half, high=value + half)


def span_loss(losses: Losses, first: int, stop: int | None = None) -> PerDocument:
    """Return each document's mean loss of the targets first, ..., stop - 1 (to the end for None).

    Raises:
        ValueError: if there are none.
    """
    columns = losses[:, max(first, 1) - 1 : None if stop is None else stop - 1]
    if columns.shape[1] == 0:
        raise ValueError(f"no targets from {first} to {stop} in {losses.shape[1] + 1} tokens")
    return columns.mean(1)


def in_context_gain(losses: Losses) -> PerDocument:
    """Return the loss early in the window less the loss late in it: what context is worth.

    Early is the second tenth of the window, which begins at a tenth of it, late the last tenth. In
    the source these are single tokens, the 50th and the 500th (arXiv 2209.11895).
    """
    n = losses.shape[1] + 1
    tenth = n // 10
    return span_loss(losses, tenth, 2 * tenth) - span_loss(losses, n - tenth)


def copy_cost(losses: Losses, length: int) -> PerDocument:
    """Return the loss of a segment's second copy less that of its first: negative if it is copied.

    Each copy's first token, which does not show yet that there is a copy, is left out.

    Args:
        losses: of windows that end in a segment and the same segment again.
        length: of the segment, in tokens.
    """
    n = losses.shape[1] + 1
    first = span_loss(losses, n - 2 * length + 1, n - length)
    return second_copy_loss(losses, length) - first


def second_copy_loss(losses: Losses, length: int) -> PerDocument:
    """Return the loss of a segment's second copy, without its first token."""
    n = losses.shape[1] + 1
    return span_loss(losses, n - length + 1)


def extrapolation_cost(losses: Losses, trained: int) -> PerDocument:
    """Return the loss beyond the trained context less that in its last quarter.

    Args:
        losses: of windows that are longer than the trained context.
        trained: the length that the model was trained at, in tokens.
    """
    return span_loss(losses, trained) - span_loss(losses, trained - trained // 4, trained)
