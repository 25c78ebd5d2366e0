"""Maps less a mean of their own: each row's (the pattern), or each diagonal's.

Patterns are defined on the cells skip_keys <= j < i that the model does not mask. A sliding window,
or a chunk, leaves each query its latest keys: the first of these, per query, says which cells there
are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Rows: TypeAlias = Float[Tensor, "*map row key_pos"]
EDGE = 0.05  # of the kept keys


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptCells:
    """The cells on which patterns are defined: first[i] <= j < i.

    Attributes:
        first: the first kept key of each query.
        skip_keys: how many first keys are left out for all queries.

    Example:
        >>> KeptCells.of(torch.tensor([0, 0, 0, 1, 2]), 1).n_keys.tolist()
        [0, 0, 1, 2, 2]
    """

    first: Int[Tensor, " query_pos"]
    skip_keys: int

    @classmethod
    def of(cls, first_visible: Int[Tensor, " query_pos"], skip_keys: int) -> KeptCells:
        """Return the cells of a layer, from the first key that each query sees.

        Raises:
            ValueError: if no row has two of them.
        """
        n = len(first_visible)
        if not 0 <= skip_keys <= n - 3:
            raise ValueError(
                f"expected from 0 to {n - 3} skipped keys at {n} positions, got {skip_keys}"
            )
        return cls(first=first_visible.clamp_min(skip_keys), skip_keys=skip_keys)

    @classmethod
    def of_maps(
        cls, maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
    ) -> KeptCells:
        """Return the cells that all of some maps have.

        Raises:
            ValueError: if no row has two of them.
        """
        n = maps.shape[-1]
        return cls.of(first_visible_keys(maps).reshape(-1, n).amax(0), skip_keys)

    @property
    def n(self) -> int:
        """How many positions."""
        return len(self.first)

    @cached_property
    def n_keys(self) -> Int[Tensor, " query_pos"]:
        """How many keys of each query are kept."""
        return (torch.arange(self.n) - self.first).clamp_min(0)

    @cached_property
    def count(self) -> int:
        """How many cells are kept."""
        return int(self.n_keys.sum())

    @cached_property
    def by_distance(self) -> Float[Tensor, " distance"]:
        """The number of kept cells at i - j = 0, 1, ..., n - 1; none is at 0."""
        n_rows = torch.bincount(self.n_keys, minlength=self.n).double()
        counts = n_rows.flip(0).cumsum(0).flip(0)  # a query of k keys has the distances 1 to k
        counts[0] = 0
        return counts

    @property
    def edge(self) -> int:
        """The key behind the first 5% of the kept ones, of which there is one at least."""
        return self.skip_keys + max(1, round(EDGE * (self.n - self.skip_keys)))

    @cached_property
    def first_by_distance(self) -> Float[Tensor, " distance"]:
        """The number of kept cells at each distance whose keys are among the first 5%."""
        others = replace(self, first=self.first.clamp_min(self.edge))
        return self.by_distance - others.by_distance

    def rows(self, start: int, stop: int) -> Bool[Tensor, "row key_pos"]:
        """Return which cells of the queries start to stop - 1 are kept, of the keys before stop."""
        key = torch.arange(stop)
        return (key < torch.arange(start, stop)[:, None]) & (key >= self.first[start:stop, None])


def first_visible_keys(
    maps: Float[Tensor, "*batch query_pos key_pos"],
) -> Int[Tensor, "*batch query_pos"]:
    """Return the first key j < i that each query sees: masked cells are NaN.

    A map whose NaN are not those of windows or chunks counts as without any.

    Example:
        >>> nan = torch.nan
        >>> first_visible_keys(torch.tensor([[1, nan, nan], [2, 3, nan], [nan, 4, 5]])).tolist()
        [0, 0, 1]
    """
    n = maps.shape[-1]
    visible = ~maps.isnan() & torch.ones(n, n, dtype=torch.bool, device=maps.device).tril(-1)
    first = visible.to(torch.uint8).argmax(-1)
    first = first.where(visible.any(-1), torch.arange(n, device=maps.device))
    return first.where((first.diff(dim=-1) >= 0).all(-1, keepdim=True), 0).cpu()


def kept_cells(n: int, skip_keys: int = 0) -> Bool[Tensor, "query_pos key_pos"]:
    """Return the cells on which patterns are defined without a window: skip_keys <= j < i.

    Raises:
        ValueError: if no row has two of them.
    """
    return KeptCells.of(torch.zeros(n, dtype=torch.long), skip_keys).rows(0, n)


def row_centred(
    maps: Float[Tensor, "*batch query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Subtract from each row its mean over skip_keys <= j < i: the pattern in a score map.

    Other cells become NaN. Cells that a window hides are NaN, and no part of a mean.

    Raises:
        ValueError: for a non-finite cell among j < i that no window hides.

    Example:
        >>> row_centred(torch.tensor([[0., 0, 0], [5, 0, 0], [1, 3, 0]]))
        tensor([[nan, nan, nan],
                [ 0., nan, nan],
                [-1.,  1., nan]])
    """
    visible = torch.arange(maps.shape[-1]) >= first_visible_keys(maps)[..., None]
    cells = visible & kept_cells(maps.shape[-1], skip_keys)
    return centred_rows(maps, cells).where(cells, torch.nan)


def centred_rows(rows: Rows, cells: Bool[Tensor, "*#map row key_pos"]) -> Rows:
    """Return a block of rows of patterns: less their means over the kept cells, 0 elsewhere.

    Args:
        rows: scores of some queries, with the keys up to the last of them.
        cells: which of them are kept.

    Raises:
        ValueError: for a kept cell that is not finite.
    """
    inside = rows.where(cells, 0.0)
    if not inside.sum().isfinite():
        raise ValueError("a score map has a non-finite cell below the diagonal")
    # Less a key of its own first: rounding would leave a pattern in a row of equal scores.
    first = cells.to(torch.uint8).argmax(-1, keepdim=True).expand(*inside.shape[:-1], 1)
    inside = inside.sub_(inside.gather(-1, first)).where(cells, 0.0)
    counts = cells.sum(-1, keepdim=True).clamp_min(1)
    return inside.sub_(inside.sum(-1, keepdim=True) / counts).where(cells, 0.0)


def pattern_rms(
    maps: Float[Tensor, "layer query_pos key_pos"], skip_keys: int = 0
) -> Float[Tensor, " layer"]:
    """Return the RMS of maps less each row's mean over the keys skip_keys <= j < i.

    It holds the maps' noise too, which the amplitude of `measure` does not.

    Example:
        >>> pattern_rms(torch.tensor([[[0.0, 0, 0], [5, 0, 0], [1, 3, 0]]]))
        tensor([0.8165])
    """
    cells = torch.ones(maps.shape[-2:], dtype=torch.bool).tril(-1)
    cells[:, :skip_keys] = False
    inside = maps.where(cells, torch.nan)
    centred = inside - inside.nanmean(-1, keepdim=True)
    return centred.square().flatten(-2).nanmean(-1).sqrt()


def diagonal_normalised(
    maps: Float[Tensor, "*batch query_pos key_pos"],
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Subtract from each cell the mean of its diagonal (the paper's Figures 4 and 5).

    Means are over the cells that hold a number; the others, such as masked ones, become NaN.

    Example:
        >>> diagonal_normalised(torch.tensor([[1.0, torch.nan], [5.0, 3.0]]))
        tensor([[-1., nan],
                [ 0.,  1.]])
    """
    n, position = maps.shape[-1], torch.arange(maps.shape[-1])
    known, diagonal = maps.isfinite(), position[:, None] - position[None, :] + n - 1
    sums, counts = (torch.zeros(*maps.shape[:-2], 2 * n - 1, dtype=maps.dtype) for _ in range(2))
    sums.index_add_(-1, diagonal.flatten(), maps.where(known, 0.0).flatten(-2))
    counts.index_add_(-1, diagonal.flatten(), known.to(maps.dtype).flatten(-2))
    means = sums / counts.clamp_min(1)
    return (maps - means[..., diagonal]).where(known, torch.nan)
