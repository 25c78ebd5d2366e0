"""Offset profiles: the mean of a map over each distance from query to key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import MIN_FOLDS, fold_weights, standard_error
from nope_probe.analyses.pattern import kept_cells


@dataclass(frozen=True, kw_only=True)
class OffsetProfile:
    """f(tau), the mean of a map over the cells with i - j = tau, for tau = 1, 2, ...

    Attributes:
        value, low, high: the profile and its 95% jackknife interval, nats.
    """

    value: Float[Tensor, "*batch offset"]
    low: Float[Tensor, "*batch offset"]
    high: Float[Tensor, "*batch offset"]


def offset_means(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch offset"]:
    """Return the mean of maps over skip_keys <= j < i at each distance i - j, from 1 on.

    Example:
        >>> offset_means(torch.tensor([[0., 0, 0], [5, 0, 0], [1, 3, 0]]))
        tensor([4., 1.])
    """
    n = maps.shape[-1]
    cells = kept_cells(n, skip_keys)
    position = torch.arange(n)
    offset = (position[:, None] - position[None, :])[cells] - 1
    n_offsets = n - 1 - skip_keys
    sums = torch.zeros(*maps.shape[:-2], n_offsets, dtype=maps.dtype)
    sums.index_add_(-1, offset, maps[..., cells])
    return sums / torch.bincount(offset, minlength=n_offsets).to(maps.dtype)


def offset_profile(
    folds: Float[Tensor, "fold *batch query_pos key_pos"],
    skip_keys: int = 0,
    *,
    counts: Int[Tensor, " fold"] | None = None,
) -> OffsetProfile:
    """Return the offset profile of fold maps, with its interval at each offset.

    Raises:
        ValueError: for fewer than 4 folds.
    """
    return profile_of_means(offset_means(folds.double(), skip_keys), counts=counts)


def profile_of_means(
    means: Float[Tensor, "fold *batch offset"], *, counts: Int[Tensor, " fold"] | None = None
) -> OffsetProfile:
    """Return the offset profile, with its interval, from that of each fold.

    Raises:
        ValueError: for fewer than 4 folds.
    """
    from scipy.special import stdtrit

    n_folds = len(means)
    if n_folds < MIN_FOLDS:
        raise ValueError(f"expected at least {MIN_FOLDS} folds, got {n_folds}")
    weights = fold_weights(n_folds, counts)
    value = torch.einsum("f,f...->...", weights, means)
    # Of a mean over sequences, the jackknife's standard error is that of the fold means.
    quantile = float(stdtrit(float(1 / weights.square().sum()) - 1, 0.975))
    half = quantile * standard_error(means, counts)
    return OffsetProfile(value=value, low=value - half, high=value + half)
