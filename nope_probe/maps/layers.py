"""The score maps of a layer, which know their folds and rows, and the positional pattern in them.

Softmax ignores a constant per row. The pattern of a layer is therefore its score map less each
row's mean over the keys j < i that the query sees. It splits into two orthogonal parts: at the
first keys, which models treat as a sink, and among the other keys.
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
from nope_probe.maps.centred import KeptCells, centred_rows
from nope_probe.maps.estimates import Estimates, ProductSums, fold_weights, leave_one_out
from nope_probe.maps.fold_rows import FoldRows, Stored, TensorFolds
from nope_probe.maps.folds import pooled
from nope_probe.maps.rows import BLOCK_BYTES, MapRows, QueryPositions

Rows = Float[Tensor, "fold row key_pos"]
Part = Literal["whole", "first", "others"]
Name = TypeVar("Name", bound=Hashable)  # names maps: a layer, or a head


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMaps:
    """The fold means of the scores of one layer, or of one head, in nats.

    Attributes:
        folds: the fold means, in memory or packed.
        counts: sequences per fold.
        skip_keys: how many first keys stand apart in patterns: an attention sink.
        stored_mean: [row, key_pos], the mean over all sequences, if it is stored beside the folds.
        mean_term: the mean term <E q_i, E k_j>, if it was kept.
        heads: the maps of the layer's heads, if they were kept.
    """

    folds: FoldRows
    counts: Int[Tensor, " fold"]
    skip_keys: int = 0
    stored_mean: Stored | None = None
    mean_term: LayerMaps | None = None
    heads: tuple[LayerMaps, ...] = ()

    @classmethod
    def of(
        cls,
        folds: Float[Tensor, "fold row key_pos"],
        counts: Int[Tensor, " fold"] | None = None,
        query_positions: QueryPositions = None,
        skip_keys: int = 0,
    ) -> LayerMaps:
        """Return fold means in memory as the maps of a layer.

        Args:
            folds: fold means of scores, nats.
            counts: sequences per fold; all the same by default.
            query_positions: the queries of the rows; all by default.
            skip_keys: how many first keys stand apart in patterns.
        """
        sizes = torch.ones(len(folds), dtype=torch.long) if counts is None else counts
        rows = TensorFolds(folds, MapRows.of(folds, query_positions))
        return cls(folds=rows, counts=sizes, skip_keys=skip_keys)

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

    def without_each(self, folds: Float[Tensor, "fold *map"]) -> Tensor:
        """Return the mean of fold means over all sequences, then the mean without each fold."""
        return leave_one_out(folds, self.weights)

    @property
    def pattern(self) -> Pattern:
        """The positional pattern, with the first keys apart.

        Raises:
            ValueError: if no row has two other keys.
        """
        (pattern,) = shared_patterns([self])
        return pattern

    @property
    def others(self) -> Pattern:
        """The pattern among the other keys alone; see `Pattern.among_others`."""
        return self.pattern.among_others


class Block(NamedTuple):
    """Some rows of a pattern.

    Attributes:
        start: the first query; the keys are those before the last query, itself included.
        scores: the scores of the rows, nats, float64; NaN where masked.
        rows: the pattern, 0 outside its cells.
    """

    start: int
    scores: Rows
    rows: Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """The positional pattern of a layer, or one of its two orthogonal parts.

    In each row `first` is constant over the other keys, where `others` sums to 0. For any two
    patterns <X, Y> = <X.first, Y.first> + <X.others, Y.others>, fold by fold.

    Attributes:
        maps: the layer's scores.
        visible: the cells of the whole pattern, over which products are means.
        apart: the cells of the other keys.
        part: the whole, the part at the first keys, or the part among the other keys.

    Example:
        >>> pattern = LayerMaps.of(torch.randn(4, 7, 7), skip_keys=1).pattern
        >>> parts = pattern.first.squares() + pattern.others.squares()
        >>> torch.allclose(parts.values, pattern.squares().values)
        True
    """

    maps: LayerMaps
    visible: KeptCells
    apart: KeptCells
    part: Part = "whole"

    @property
    def first(self) -> Pattern:
        """The part at the first keys: the whole less the part among the other keys."""
        return replace(self, part="first")

    @property
    def others(self) -> Pattern:
        """The part among the other keys; 0 at the first keys."""
        return replace(self, part="others")

    @property
    def among_others(self) -> Pattern:
        """The part among the other keys as a pattern of its own, whose means leave the rest out."""
        return replace(self, visible=self.apart, part="whole")

    @property
    def has_first(self) -> bool:
        """Whether any query sees a first key that stands apart; else the part there is 0."""
        return not self.visible.first.equal(self.apart.first)

    @property
    def n_folds(self) -> int:
        """How many folds."""
        return self.maps.folds.n_folds

    @property
    def cells(self) -> KeptCells:
        """The cells where the pattern can differ from 0."""
        return self.apart if self.part == "others" else self.visible

    def blocks(self, n_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield the pattern by blocks of consecutive queries.

        Args:
            n_bytes: memory for a block.
        """
        maps = self.maps.folds
        for start, stop in maps.where.blocks(maps.n_folds, n_bytes):
            scores = maps.rows(start, stop).double()
            yield Block(start, scores, self.centred(scores, start))

    def centred(self, scores: Rows, start: int) -> Rows:
        """Return the pattern in rows of scores from the query `start` on, 0 outside its cells.

        Raises:
            ValueError: for a cell that is not finite.
        """
        stop = start + scores.shape[-2]
        if self.part == "others":
            return centred_rows(scores, self.apart.rows(start, stop))
        whole = centred_rows(scores, self.visible.rows(start, stop))
        if self.part == "whole":
            return whole
        return whole - centred_rows(scores, self.apart.rows(start, stop))

    def dense(self) -> Rows:
        """Return the pattern of each fold in memory, NaN outside its cells, in float64."""
        maps, cells = self.maps.folds.maps.double(), self.cells.mask
        whole = centred_rows(maps, cells)
        if self.part == "first":
            whole = whole - centred_rows(maps, self.apart.mask)
        return whole.where(cells, torch.nan)

    def squares(self) -> Estimates:
        """Return the mean square <P, P>, squared nats."""
        sums = ProductSums()
        for block in self.blocks():
            sums.add(block.rows[None])
        return self.estimates(sums)

    def product(self, other: Pattern) -> Estimates:
        """Return <P, Q> with the pattern of other maps on the same sequences and cells."""
        sums = ProductSums()
        for one, two in zip(self.blocks(), other.blocks(), strict=True):
            sums.add(one.rows[None], two.rows[None])
        return self.estimates(sums)

    def estimates(self, sums: ProductSums) -> Estimates:
        """Return a mean over the cells from sums over blocks."""
        return sums.product(self.visible.count, self.maps.weights)


def shared_patterns(maps: Sequence[LayerMaps]) -> list[Pattern]:
    """Return the patterns of several maps on the cells that none of them hides.

    The first keys of the first map stand apart in all.

    Without its window a layer sees more keys. Its pattern is compared on the keys that the window
    leaves visible.

    Raises:
        UserError: if the maps differ in their positions, or in the queries of their rows.
        ValueError: if no row has two other keys.
    """
    for layer in maps[1:]:
        if layer.n != maps[0].n:
            raise UserError(
                f"the maps are of {layer.n} and {maps[0].n} positions: capture both on as many"
            )
        if not layer.queries.equal(maps[0].queries):
            raise UserError("the maps have the rows of unlike queries: capture the same query_rows")
    first = torch.stack([layer.folds.first_keys for layer in maps]).amax(0)
    where = maps[0].folds.where
    visible, apart = (KeptCells.of(first, skipped, where) for skipped in (0, maps[0].skip_keys))
    return [Pattern(maps=layer, visible=visible, apart=apart) for layer in maps]


def patterns_of_others(maps: Sequence[LayerMaps]) -> list[Pattern]:
    """Return the patterns of several maps among the other keys alone, on shared cells."""
    return [pattern.among_others for pattern in shared_patterns(maps)]


def set_apart(
    layers: Mapping[Name, LayerMaps], skip_keys: int | Literal["auto"]
) -> dict[Name, LayerMaps]:
    """Return maps whose patterns all have so many first keys apart.

    `auto` is 1 for captured maps of tokens, and 0 for maps of vectors and for bare fold means.
    """
    first = max(layer.skip_keys for layer in layers.values()) if skip_keys == "auto" else skip_keys
    apart = {name: replace(layer, skip_keys=first) for name, layer in layers.items()}
    return {
        name: replace(layer, heads=tuple(replace(x, skip_keys=first) for x in layer.heads))
        for name, layer in apart.items()
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
