"""Offset profiles: the mean of a map over each distance from query to key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import MIN_FOLDS, leave_one_out
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
    folds: Float[Tensor, "fold *batch query_pos key_pos"], skip_keys: int = 0
) -> OffsetProfile:
    """Return the offset profile of fold maps, with its interval at each offset.

    Raises:
        ValueError: for fewer than 4 folds.
    """
    from scipy.special import stdtrit

    n_folds = len(folds)
    if n_folds < MIN_FOLDS:
        raise ValueError(f"expected at least {MIN_FOLDS} folds, got {n_folds}")
    estimates = leave_one_out(offset_means(folds.double(), skip_keys))
    value, deleted = estimates[0], estimates[1:]
    variance = (n_folds - 1) / n_folds * (deleted - deleted.mean(0)).square().sum(0)
    half = float(stdtrit(n_folds - 1, 0.975)) * variance.sqrt()
    return OffsetProfile(value=value, low=value - half, high=value + half)
