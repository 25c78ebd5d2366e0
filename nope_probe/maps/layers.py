"""The score maps of a layer, which know their folds and rows, and the two questions put to them.

Softmax ignores a constant per row. What it sees of the earlier keys of a row is therefore the
*lead* of the first key, which models treat as a sink, over the mean of the other earlier keys, and
the *pattern* among these others: their scores less that mean. The two are never mixed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.maps import MIN_KEYS
from nope_probe.maps.estimates import Estimates, fold_weights
from nope_probe.maps.folds import pooled
from nope_probe.maps.rows import (
    BLOCK_BYTES,
    KeptCells,
    MapRows,
    QueryPositions,
    centred_rows,
    first_visible_keys,
)

RowsOfFolds = Float[Tensor, "fold row key_pos"]
Question = Literal["lead", "pattern"]
Name = TypeVar("Name", bound=Hashable)  # names maps: a layer, or a head


class FoldRows:
    """Fold maps of one layer in memory, which are read by blocks of rows.

    Args:
        folds: the maps.
        where: the queries of their rows, and their keys.

    Example:
        >>> maps = torch.zeros(4, 7, 7)
        >>> FoldRows(maps, MapRows.of(maps)).rows(2, 5).shape
        torch.Size([4, 3, 5])
    """

    def __init__(self, folds: Float[Tensor, "fold *cells"], where: MapRows) -> None:
        self.folds, self.n_folds, self.where = folds, len(folds), where

    @property
    def maps(self) -> RowsOfFolds:
        """All rows in memory."""
        return self.folds

    def rows(self, start: int, stop: int) -> RowsOfFolds:
        """Return the rows of the queries from start to stop - 1, with the keys before `stop`."""
        return self.folds[:, self._places(start, stop), :stop]

    @cached_property
    def first_keys(self) -> Int[Tensor, " row"]:
        """Each row's first visible key, 0 without a window."""
        return first_visible_keys(self.folds[0], self.where)

    def _places(self, start: int, stop: int) -> slice:
        """Return the places of the rows of consecutive queries."""
        first = int(torch.searchsorted(self.where.queries, start))
        return slice(first, first + stop - start)


class PackedFolds(FoldRows):
    """Fold maps as their cells j <= i, row by row, in memory or mapped from a file.

    A block of rows is read from the file. Cells above the diagonal are NaN in `rows`.
    """

    @property
    def maps(self) -> RowsOfFolds:
        return self.where.unpack(self.folds)

    @cached_property
    def first_keys(self) -> Int[Tensor, " row"]:
        cells = self.folds[0]
        if not cells.isnan().any():
            return torch.zeros(len(self.where.queries), dtype=torch.long)
        return first_visible_keys(self.where.unpack(cells), self.where)

    def rows(self, start: int, stop: int) -> RowsOfFolds:
        places, starts = self._places(start, stop), self.where.starts
        first = starts[places.start]
        cells = self.folds[:, first : starts[places.stop]]
        rows = cells.new_full((self.n_folds, stop - start, stop), torch.nan)
        for row in range(start, stop):  # a copy per row is faster than a copy by index
            place = starts[places.start + row - start] - first
            rows[:, row - start, : row + 1] = cells[:, place : place + row + 1]
        return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMaps:
    """The fold means of the scores of one layer, or of one head, in nats.

    Attributes:
        folds: the fold means, in memory or packed.
        counts: sequences per fold.
        skip_keys: how many keys count as first: 1 for tokens, 0 for vectors.
        across_halves: whether something was estimated on the texts of each half of the folds, even
            and odd, so that only an even and an odd fold are independent.
        stored_mean: [row, key_pos], the mean over all sequences, if it is stored next to the folds.
        heads: the maps of the layer's heads, if they were kept.
    """

    folds: FoldRows
    counts: Int[Tensor, " fold"]
    skip_keys: int = 0
    across_halves: bool = False
    stored_mean: Float[Tensor, "row key_pos"] | None = None
    heads: tuple[LayerMaps, ...] = ()

    @classmethod
    def of(
        cls,
        folds: Float[Tensor, "fold row key_pos"],
        counts: Int[Tensor, " fold"] | None = None,
        query_positions: QueryPositions = None,
        skip_keys: int = 0,
        across_halves: bool = False,
    ) -> LayerMaps:
        """Return fold means in memory as the maps of a layer.

        Args:
            folds: fold means of scores, nats.
            counts: sequences per fold; all the same by default.
            query_positions: the queries of the rows; all by default.
            skip_keys: how many keys count as first.
            across_halves: whether only an even and an odd fold are independent.
        """
        sizes = torch.ones(len(folds), dtype=torch.long) if counts is None else counts
        rows = FoldRows(folds, MapRows.of(folds, query_positions))
        return cls(folds=rows, counts=sizes, skip_keys=skip_keys, across_halves=across_halves)

    @property
    def n(self) -> int:
        """How many positions."""
        return self.folds.where.n

    @property
    def queries(self) -> Int[Tensor, " row"]:
        """The queries of the rows."""
        return self.folds.where.queries

    @cached_property
    def weights(self) -> Float[Tensor, " fold"]:
        """The share of all sequences that each fold holds."""
        return fold_weights(self.folds.n_folds, self.counts)

    @cached_property
    def visible(self) -> KeptCells:
        """The cells j < i that the model does not hide."""
        return KeptCells.of(self.folds.first_keys, 0, self.folds.where)

    def mean(self, rows: slice = slice(None)) -> Float[Tensor, "row key_pos"]:
        """Return rows of the mean over all sequences; masked cells are NaN."""
        if self.stored_mean is not None:
            return self.stored_mean[rows]
        return pooled(self.folds.maps[:, rows], self.counts)

    @property
    def pattern(self) -> Pattern:
        """The pattern among the other keys.

        Raises:
            UserError: if no row has two other keys.
        """
        (pattern,) = shared_patterns([self])
        return pattern


class Block(NamedTuple):
    """Some rows of a pattern.

    Attributes:
        start: the first query; the keys are those before the last query, itself included.
        scores: the scores of the rows, nats, float64; NaN where masked.
        rows: the pattern, 0 outside its cells.
    """

    start: int
    scores: RowsOfFolds
    rows: RowsOfFolds

    @property
    def queries(self) -> Int[Tensor, " row"]:
        """The queries of the rows."""
        return torch.arange(self.start, self.start + self.rows.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """The positional pattern of a layer: its scores less each row's mean over the other keys.

    Attributes:
        maps: the layer's scores.
        cells: the cells of the other keys, skip_keys <= j < i, that the model does not hide.

    Example:
        >>> pattern = LayerMaps.of(torch.randn(4, 7, 7), skip_keys=1).pattern
        >>> next(pattern.blocks()).rows[:, 6, 1:6].sum(1).abs().max() < 1e-6
        tensor(True)
    """

    maps: LayerMaps
    cells: KeptCells

    @property
    def n_folds(self) -> int:
        """How many folds."""
        return self.maps.folds.n_folds

    @cached_property
    def lead(self) -> Lead | None:
        """The lead of the first key on the same rows; None where no query has one."""
        lead = Lead(maps=self.maps, cells=self.cells)
        return lead if self.cells.skip_keys and len(lead.queries) else None

    def blocks(self, n_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield the pattern by blocks of consecutive queries.

        Args:
            n_bytes: memory for a block.
        """
        maps = self.maps.folds
        for start, stop in maps.where.blocks(maps.n_folds, n_bytes):
            scores = maps.rows(start, stop).double()
            yield Block(start, scores, self.centred(scores, start))

    def centred(self, scores: RowsOfFolds, start: int) -> RowsOfFolds:
        """Return the pattern in rows of scores from the query `start` on, 0 outside its cells.

        Raises:
            ValueError: for a cell that is not finite.
        """
        return centred_rows(scores, self.cells.rows(start, start + scores.shape[-2]))

    def with_lead(
        self, rows: Float[Tensor, "row key_pos"], start: int
    ) -> Float[Tensor, "row key_pos"]:
        """Return the pattern in rows of a map, with the first keys less the other keys' mean.

        The column of the first key is thereby its lead, of queries with few keys too. All cells
        that are neither are NaN.

        Args:
            rows: of consecutive queries, with all keys.
            start: the first query.
        """
        stop = start + len(rows)
        kept, shown = self.cells.rows(start, stop), torch.full_like(rows, torch.nan)
        pattern = centred_rows(rows[:, :stop], kept)
        shown[:, :stop] = pattern.where(kept, torch.nan)
        has_lead = self.cells.sees_first[start:stop] & kept.any(-1)
        first = slice(self.cells.skip_keys)
        mean = (rows[:, :stop] - pattern).where(kept, 0.0).sum(-1) / kept.sum(-1).clamp_min(1)
        shown[:, first] = (rows[:, first] - mean[:, None]).where(has_lead[:, None], torch.nan)
        return shown

    def mean_with_lead(self) -> Float[Tensor, "row key_pos"]:
        """Return the pattern of the mean map, with leads in the first keys' columns, nats."""
        mean, row, blocks = self.maps.mean(), 0, []
        for start, stop in self.maps.folds.where.blocks(1):
            blocks.append(self.with_lead(mean[row : row + stop - start], start))
            row += stop - start
        return torch.cat(blocks)

    def estimates(self, gram: Float[Tensor, "fold fold2"]) -> Estimates:
        """Return the estimates of a mean square from the inner products of fold patterns."""
        maps = self.maps
        return Estimates.of_square(gram, self.cells.count, maps.weights, maps.across_halves)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lead:
    """The lead of the first key: its score less the mean of the other earlier keys, per query.

    lead(i) = S[i, 0] - mean of S[i, j] over 1 <= j < i, for the queries that see key 0 and 8 other
    keys or more. With several first keys the lead is of their mean.

    Attributes:
        maps: the layer's scores.
        cells: the cells of the other keys.

    Example:
        >>> maps = torch.zeros(4, 13, 13)
        >>> maps[..., 0] = 5.0
        >>> lead = LayerMaps.of(maps, skip_keys=1).pattern.lead
        >>> lead.queries.tolist(), lead.rows(maps, 0)[0].tolist()
        ([9, 10, 11, 12], [5.0, 5.0, 5.0, 5.0])
    """

    maps: LayerMaps
    cells: KeptCells

    @cached_property
    def queries(self) -> Int[Tensor, " query"]:
        """The queries that have a lead."""
        queries = self.cells.where.queries
        return queries[(self.cells.sees_first & (self.cells.n_keys >= MIN_KEYS))[queries]]

    @cached_property
    def weights(self) -> Float[Tensor, "row key_pos"]:
        """The weight of each score in its row's lead: 1/k at k first keys, -1/n at n others.

        Rows without a lead have the weight 0.
        """
        others = self.cells.mask.double()
        weights = -others / others.sum(1, keepdim=True).clamp_min(1)
        weights[:, : self.cells.skip_keys] = 1 / self.cells.skip_keys
        return weights * torch.isin(self.cells.where.queries, self.queries)[:, None]

    def rows(self, scores: RowsOfFolds, start: int) -> Float[Tensor, "fold query"]:
        """Return the leads of the queries in rows of scores from the query `start` on.

        Raises:
            ValueError: for a cell that is not finite.
        """
        ends = torch.tensor([start, start + scores.shape[-2]])
        first, behind = torch.searchsorted(self.queries, ends).tolist()
        queries = self.queries[first:behind]
        scores, skip_keys = scores[:, queries - start], self.cells.skip_keys
        cells = self.cells.of_queries(queries, scores.shape[-1])
        others = scores.where(cells, 0.0).sum(-1) / cells.sum(-1)
        leads = scores[..., :skip_keys].mean(-1) - others
        if not leads.isfinite().all():
            raise ValueError("a score map has a non-finite cell below the diagonal")
        return leads


def shared_patterns(maps: Sequence[LayerMaps]) -> list[Pattern]:
    """Return the patterns of several maps, whose leads they know, on cells that none of them hides.

    The first map says how many keys count as first. Without its window a layer sees more keys. Its
    pattern is compared on the keys that the window leaves visible.

    Raises:
        UserError: if the maps differ in their positions, or in the queries of their rows, or if no
            row has two other keys.
    """
    for layer in maps[1:]:
        if layer.n != maps[0].n:
            raise UserError(
                f"the maps are of {layer.n} and {maps[0].n} positions: capture both on as many"
            )
        if not layer.queries.equal(maps[0].queries):
            raise UserError("the maps have the rows of unlike queries: capture the same query_rows")
    first = torch.stack([layer.folds.first_keys for layer in maps]).amax(0)
    cells = KeptCells.of(first, maps[0].skip_keys, maps[0].folds.where)
    return [Pattern(maps=layer, cells=cells) for layer in maps]


def with_skip_keys(
    layers: Mapping[Name, LayerMaps], skip_keys: int | Literal["auto"]
) -> dict[Name, LayerMaps]:
    """Return maps of which so many keys count as first; with `auto`, as many as the maps say.

    Captured maps of tokens say 1, maps of vectors and bare fold means 0.
    """
    if skip_keys == "auto":
        return dict(layers)
    return {
        name: replace(
            layer,
            skip_keys=skip_keys,
            heads=tuple(replace(head, skip_keys=skip_keys) for head in layer.heads),
        )
        for name, layer in layers.items()
    }


def windows_of(layers: Mapping[int, LayerMaps]) -> dict[str, int]:
    """Return the window of each layer that has one: how many keys a query sees, itself included.

    Args:
        layers: the maps of each layer by its number.
    """
    return {
        f"L{layer}": 1 + int(maps.visible.n_keys.max())
        for layer, maps in layers.items()
        if maps.folds.first_keys.any()
    }
