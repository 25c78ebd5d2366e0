"""Contrasts of condition maps: their maps, their inner products and their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Interval, cross_products, rms, rms_ratio, share
from nope_probe.analyses.shapley import Condition, Contrast


def contrast_map(
    contrast: Contrast, maps: Mapping[Condition, Float[Tensor, "*batch query_pos key_pos"]]
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Return the map of a contrast, nats: the weighted sum of the conditions' maps."""
    total = torch.zeros_like(next(iter(maps.values())))
    for condition, weight in contrast.items():
        total += weight * maps[condition]
    return total


class ContrastGram:
    """Inner products of contrasts, on all folds and without each, from one Gram matrix.

    Args:
        conditions: the conditions, in the order of the patterns.
        patterns: the cells of each condition's pattern, per fold, nats.
        counts: sequences per fold; all the same by default.
    """

    def __init__(
        self,
        conditions: Sequence[Condition],
        patterns: Float[Tensor, "condition fold cell"],
        counts: Int[Tensor, " fold"] | None = None,
    ) -> None:
        self.row = {condition: row for row, condition in enumerate(conditions)}
        self.gram = cross_products(patterns, patterns, counts)
        self.counts = counts

    def product(self, one: Contrast, other: Contrast) -> Float[Tensor, " one_plus_folds"]:
        """Return <one, other> as a mean over cells, in squared nats.

        Raises:
            KeyError: for a condition that has no pattern here.
        """
        left, right = self._coefficients(one), self._coefficients(other)
        return torch.einsum("x,fxy,y->f", left, self.gram, right)

    def rms(self, contrast: Contrast) -> Interval:
        """Return the RMS of a contrast, nats."""
        return rms(self.product(contrast, contrast), self.counts)

    def share(self, part: Contrast, whole: Contrast) -> Interval:
        """Return <part, whole> / <whole, whole>."""
        return share(self.product(part, whole), self.product(whole, whole), self.counts)

    def rms_ratio(self, whole: Contrast, part: Contrast) -> Interval:
        """Return RMS whole / RMS part; undefined where either does not exceed its noise."""
        return rms_ratio(self.product(whole, whole), self.product(part, part), self.counts)

    def _coefficients(self, contrast: Contrast) -> Float[Tensor, " condition"]:
        vector = torch.zeros(len(self.row), dtype=torch.float64)
        for condition, weight in contrast.items():
            vector[self.row[condition]] += weight
        return vector
