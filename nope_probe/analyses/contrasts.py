"""Contrasts of conditions, and the inner products of their leads and patterns.

A condition is the model with some components removed. A contrast is a linear combination of the
maps of conditions. It holds only coefficients, so every size, and all that is kept of a pattern, is
an inner product in one Gram matrix, of the leads or of the patterns of one layer.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import UNDEFINED, Interval, along, jackknife, rms
from nope_probe.analyses.pattern_rows import beyond_rounding, mean_squares
from nope_probe.maps.estimates import Estimates, ProductSums, leave_one_out
from nope_probe.maps.layers import Pattern, Question
from nope_probe.removal import INTERACTION, Condition

GRAM_BYTES = 1 << 26
Name = TypeVar("Name", bound=Hashable)  # names a map: a condition, or a term of a split
Contrast = Mapping[Condition, float]


def source_terms(sources: Sequence[str]) -> dict[str, Contrast]:
    """Return the terms of the exact sum of the sources; without sources there are none.

    They add up to the intact map. The trained weights are kept. The term of a source is what this
    source adds to a model without any source. An interaction is what sources add only together
    (the paper's section 5). `without_sources` is what is left without any source.

    Args:
        sources: the sources that the model has: the mask, and a window or position encodings.

    Example:
        >>> list(source_terms(["mask", "rope"]))
        ['mask', 'rope', 'mask_x_rope', 'without_sources']
    """
    terms: dict[str, Contrast] = {
        INTERACTION.join(term): {
            Condition({*sources} - {*kept}): (-1.0) ** (size - len(kept))
            for n_kept in range(size, -1, -1)
            for kept in combinations(term, n_kept)
        }
        for size in range(1, len(sources) + 1)
        for term in combinations(sources, size)
    }
    return {**terms, "without_sources": {Condition(sources): 1.0}} if sources else {}


def contrast_map(
    contrast: Contrast, maps: Mapping[Condition, Float[Tensor, "*batch row key_pos"]]
) -> Float[Tensor, "*batch row key_pos"]:
    """Return the map of a contrast, nats: the weighted sum of the conditions' maps."""
    total = torch.zeros_like(next(iter(maps.values())))
    for condition, weight in contrast.items():
        total += weight * maps[condition]
    return total


@dataclass(frozen=True, kw_only=True, eq=False)
class ContrastGram(Generic[Name]):
    """Inner products of contrasts, on all folds and without each fold, from one Gram matrix.

    Products of leads are means over queries, and products of patterns are means over cells.

    Attributes:
        row: the row of each condition in the Gram matrices.
        products: the inner products of the conditions' leads or patterns, squared nats.
        across_halves: the conditions of which only an even and an odd fold are independent.
        across: the inner products over such pairs alone, if there are such conditions.
        weights: the share of all sequences that each fold holds.
        score_squares: the mean square of each condition's scores, squared nats. A contrast within
            their rounding is 0, and shares of it are undefined.
        means: the mean lead over queries in each condition, nats; None for patterns.
    """

    row: Mapping[Name, int]
    products: Float[Tensor, "one_plus_folds condition condition"]
    weights: Float[Tensor, " fold"]
    score_squares: Float[Tensor, " condition"]
    means: Float[Tensor, "one_plus_folds condition"] | None = None
    across_halves: Collection[Name] = ()
    across: Float[Tensor, "one_plus_folds condition condition"] | None = None

    def product(self, one: Mapping[Name, float], other: Mapping[Name, float]) -> Estimates:
        """Return <one, other>, in squared nats.

        Raises:
            KeyError: for a condition without a map.
        """
        left, right = self._coefficients(one), self._coefficients(other)
        products = self.products
        if self.across is not None and {*one, *other} & {*self.across_halves}:
            products = self.across
        values = torch.einsum("x,fxy,y->f", left, products, right)
        return Estimates(values=values, weights=self.weights)

    def size(self, contrast: Mapping[Name, float]) -> Interval:
        """Return the mean lead of a contrast, or the RMS of its pattern, nats."""
        if self.means is None:
            return rms(self._square(contrast))
        return jackknife(self.mean(contrast))

    def order(self, name: Name, intact: Name) -> Estimates | None:
        """Return <P(c), P> / sqrt(<P, P>), how much of the intact pattern is there, nats.

        It is the amplitude of the intact pattern itself, 0 where nothing like it is there, and
        negative where it is reversed. None where <P, P> does not exceed its noise.

        Args:
            name: the condition c.
            intact: the intact model.
        """
        return along(self.product({name: 1.0}, {intact: 1.0}), self._square({intact: 1.0}))

    def mean(self, contrast: Mapping[Name, float]) -> Estimates:
        """Return the mean lead of a contrast, nats; 0 within rounding.

        Raises:
            ValueError: for the inner products of patterns.
        """
        if self.means is None:
            raise ValueError("patterns have no mean: their rows add up to 0")
        square = self._square(contrast)
        values = self.means @ self._coefficients(contrast)
        return square.with_values(values * bool(square.values.any()))

    def part(self, term: Mapping[Name, float], whole: Mapping[Name, float]) -> Interval:
        """Return how much of a whole lead or pattern V a term T has, nats.

        Of a lead it is the term's mean lead, and of a pattern <T, V> / sqrt(<V, V>). It is
        undefined where the whole is within its noise.
        """
        square = self._square(whole)
        part = along(self.product(term, whole), square)
        if part is None:
            return UNDEFINED
        return jackknife(part) if self.means is None else self.size(term)

    def _square(self, contrast: Mapping[Name, float]) -> Estimates:
        """Return the mean square of a contrast, 0 within the rounding of its conditions' scores."""
        score_square = self._coefficients(contrast).square() @ self.score_squares
        return beyond_rounding(self.product(contrast, contrast), score_square)

    def _coefficients(self, contrast: Mapping[Name, float]) -> Float[Tensor, " condition"]:
        vector = torch.zeros(len(self.score_squares), dtype=torch.float64)
        for condition, weight in contrast.items():
            vector[self.row[condition]] += weight
        return vector


Grams = Mapping[Question, ContrastGram[Name]]  # of the pattern, and of the lead if there is one


def contrast_grams(
    patterns: Mapping[Name, Pattern], *, n_bytes: int = GRAM_BYTES
) -> dict[Question, ContrastGram[Name]]:
    """Return the inner products of patterns and of their leads, from one reading of the maps.

    There is no entry for the lead where no key is first, or no query has a lead.

    Args:
        patterns: the patterns of one layer in each condition, or of other maps of it, on shared
            cells.
        n_bytes: memory for the patterns of all conditions at once.
    """
    of_conditions = list(patterns.values())
    maps, cells = of_conditions[0].maps, of_conditions[0].cells
    n_maps = len(patterns) * maps.folds.n_folds
    sums, squares = ProductSums(), torch.zeros(len(patterns), dtype=torch.float64)
    leads: list[list[Float[Tensor, "fold query"]]] = [[] for _ in patterns]
    for start, stop in maps.folds.where.blocks(n_maps, n_bytes):
        shape = (len(patterns), maps.folds.n_folds, stop - start, stop)
        rows = torch.empty(shape, dtype=torch.float64)
        for index, pattern in enumerate(of_conditions):
            scores = pattern.maps.folds.rows(start, stop).double()
            squares[index] += mean_squares(scores, start, cells).mean()
            rows[index] = pattern.centred(scores, start)
            if pattern.lead is not None:
                leads[index].append(pattern.lead.rows(scores, start))
        sums.add(rows)
    grams: dict[Question, ContrastGram[Name]] = {
        "pattern": _gram_of(patterns, sums, cells.count, score_squares=squares)
    }
    if leads[0]:
        folds = torch.stack([torch.cat(of_condition, -1) for of_condition in leads])
        sums, n_queries = ProductSums(), folds.shape[-1]
        sums.add(folds)
        means = leave_one_out(folds.mean(-1).T, maps.weights)
        squares = squares + folds.square().mean((1, 2))
        grams["lead"] = _gram_of(patterns, sums, n_queries, score_squares=squares, means=means)
    return grams


def _gram_of(
    patterns: Mapping[Name, Pattern], sums: ProductSums, n_cells: int, **about: Tensor
) -> ContrastGram[Name]:
    weights = next(iter(patterns.values())).maps.weights
    in_halves = [name for name, pattern in patterns.items() if pattern.maps.across_halves]
    return ContrastGram(
        row={name: index for index, name in enumerate(patterns)},
        products=sums.products(n_cells, weights),
        across=sums.products(n_cells, weights, across_halves=True) if in_halves else None,
        across_halves=in_halves,
        weights=weights,
        **about,
    )
