"""Contrasts of condition maps: their maps, their inner products and their shares."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, ProductSums, rms, rms_ratio, share
from nope_probe.analyses.pattern_rows import beyond_rounding, mean_squares
from nope_probe.analyses.shapley import Condition, Contrast
from nope_probe.maps.centred import centred_rows
from nope_probe.maps.rows import row_blocks
from nope_probe.maps.stored_maps import LayerFolds, shared_cells

GRAM_BYTES = 1 << 26
Name = TypeVar("Name", bound=Hashable)  # names a map: a condition, or a term of a split


def contrast_map(
    contrast: Contrast, maps: Mapping[Condition, Float[Tensor, "*batch row key_pos"]]
) -> Float[Tensor, "*batch row key_pos"]:
    """Return the map of a contrast, nats: the weighted sum of the conditions' maps."""
    total = torch.zeros_like(next(iter(maps.values())))
    for condition, weight in contrast.items():
        total += weight * maps[condition]
    return total


class ContrastGram(Generic[Name]):
    """Inner products of contrasts, on all folds and without each fold, from one Gram matrix.

    Args:
        conditions: the conditions, or other maps of a layer, in the order of the Gram matrix.
        gram: the inner products of their patterns, as `cross_products` returns them, squared nats.
        counts: sequences per fold; all the same by default.
        score_squares: the mean square of each condition's scores, squared nats. A contrast within
            their rounding is 0, and shares of it are undefined.
    """

    def __init__(
        self,
        conditions: Iterable[Name],
        gram: Float[Tensor, "one_plus_folds condition condition"],
        counts: Int[Tensor, " fold"] | None = None,
        score_squares: Float[Tensor, " condition"] | None = None,
    ) -> None:
        self.row = {condition: row for row, condition in enumerate(conditions)}
        self.gram, self.counts = gram, counts
        none = torch.zeros(len(self.row), dtype=torch.float64)
        self.score_squares = none if score_squares is None else score_squares

    @classmethod
    def of_layers(
        cls,
        folds: Mapping[Name, LayerFolds],
        skip_keys: int = 0,
        counts: Int[Tensor, " fold"] | None = None,
        *,
        n_bytes: int = GRAM_BYTES,
    ) -> ContrastGram[Name]:
        """Return the inner products of one layer's patterns, read a block of rows at a time.

        Patterns are taken on the cells that no condition hides: without its window a layer sees
        more keys, and the other conditions have no scores to compare with them.

        Args:
            folds: the fold maps of a layer in each condition, nats.
            skip_keys: how many first keys the patterns leave out.
            counts: sequences per fold; all the same by default.
            n_bytes: memory for the patterns of all conditions that are held at once.
        """
        layers, sums = list(folds.values()), ProductSums()
        n, n_folds = layers[0].n, layers[0].n_folds
        cells = shared_cells(layers, skip_keys)
        squares = torch.zeros(len(layers), dtype=torch.float64)
        queries = cells.query_positions
        for start, stop in row_blocks(queries, n, len(layers) * n_folds, n_bytes):
            patterns = torch.empty(len(layers), n_folds, stop - start, stop, dtype=torch.float64)
            for index, layer in enumerate(layers):
                rows = layer.rows(start, stop).double()
                squares[index] += mean_squares(rows, start, cells).mean()
                patterns[index] = centred_rows(rows, cells.rows(start, stop))
            sums.add(patterns)
        return cls(folds, sums.cross_products(cells.count, counts), counts, squares)

    def product(
        self, one: Mapping[Name, float], other: Mapping[Name, float]
    ) -> Float[Tensor, " one_plus_folds"]:
        """Return <one, other> as a mean over cells, in squared nats.

        Raises:
            KeyError: for a condition without a pattern.
        """
        left, right = self._coefficients(one), self._coefficients(other)
        return torch.einsum("x,fxy,y->f", left, self.gram, right)

    def rms(self, contrast: Mapping[Name, float]) -> Interval:
        """Return the RMS of a contrast, nats."""
        return rms(self._square(contrast), self.counts)

    def share(self, part: Mapping[Name, float], whole: Mapping[Name, float]) -> Interval:
        """Return <part, whole> / <whole, whole>."""
        return share(self.product(part, whole), self._square(whole), self.counts)

    def rms_ratio(self, whole: Mapping[Name, float], part: Mapping[Name, float]) -> Interval:
        """Return RMS whole / RMS part; undefined where either does not exceed its noise."""
        return rms_ratio(self._square(whole), self._square(part), self.counts)

    def _square(self, contrast: Mapping[Name, float]) -> Float[Tensor, " one_plus_folds"]:
        """Return the mean square of a contrast, 0 within the rounding of its conditions' scores."""
        score_square = self._coefficients(contrast).square() @ self.score_squares
        return beyond_rounding(self.product(contrast, contrast), score_square)

    def _coefficients(self, contrast: Mapping[Name, float]) -> Float[Tensor, " condition"]:
        vector = torch.zeros(len(self.row), dtype=torch.float64)
        for condition, weight in contrast.items():
            vector[self.row[condition]] += weight
        return vector
