"""Patterns and their non-relative parts a block of rows at a time, however long the maps are.

Where all tokens are equal, or a removed component had no effect, a pattern of the last digits is
left. It is the same in every fold, so that no noise hides it: what does not exceed the rounding of
the scores is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.distances import distance_rows, distance_sums, relative_fit
from nope_probe.analyses.jackknife import Estimates
from nope_probe.maps.centred import block_cells, centred_rows
from nope_probe.maps.stored_maps import BLOCK_BYTES, LayerFolds, TensorFolds, row_blocks

Folds: TypeAlias = LayerFolds | Float[Tensor, "fold query_pos key_pos"]
# Of the RMS score. Models in float32 leave up to half of it (one token at all of 128 positions).
ROUNDING = 8 * torch.finfo(torch.float32).eps


def as_layer(folds: Folds) -> LayerFolds:
    """Return the fold maps of a layer as ones that are read by rows."""
    return folds if isinstance(folds, LayerFolds) else TensorFolds(folds)


def pattern_rows(
    folds: LayerFolds, skip_keys: int, n_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, Float[Tensor, "fold row key_pos"]]]:
    """Yield the fold patterns of a layer by blocks of rows, each with its first row, in float64."""
    for start, stop in row_blocks(folds.n, folds.n_folds, n_bytes):
        yield start, centred_rows(folds.rows(start, stop).double(), start, skip_keys)


def pattern_distance_sums(
    folds: LayerFolds, skip_keys: int, n_bytes: int = BLOCK_BYTES
) -> Float[Tensor, "fold distance"]:
    """Return the sums of a layer's fold patterns over the cells at i - j = 0, 1, ..., n - 1."""
    sums = torch.zeros(folds.n_folds, folds.n, dtype=torch.float64)
    for start, rows in pattern_rows(folds, skip_keys, n_bytes):
        sums += distance_sums(rows, start, folds.n)
    return sums


class NonRelativeRows:
    """The non-relative parts of a layer's fold patterns.

    Args:
        by_distance: what `pattern_distance_sums` returns.
        skip_keys: how many first keys the patterns leave out.
    """

    def __init__(self, by_distance: Float[Tensor, "fold distance"], skip_keys: int) -> None:
        self.a, self.f = relative_fit(by_distance, skip_keys)
        self.skip_keys = skip_keys

    def of(
        self, patterns: Float[Tensor, "fold row key_pos"], start: int
    ) -> Float[Tensor, "fold row key_pos"]:
        """Return a block of rows of the patterns less their fit, 0 outside the kept cells."""
        stop = start + patterns.shape[-2]
        fit = distance_rows(self.f, start, stop) + self.a[:, start:stop, None]
        return (patterns - fit).where(block_cells(start, stop, self.skip_keys), 0.0)


def mean_squares(
    scores: Float[Tensor, "fold row key_pos"], start: int, skip_keys: int, n_cells: int
) -> Float[Tensor, " fold"]:
    """Return what a block of rows adds to the mean square of scores over skip_keys <= j < i.

    Args:
        scores: fold maps of the queries from `start` on, nats.
        start: the first query.
        skip_keys: how many first keys to leave out.
        n_cells: on how many cells the mean is taken, in all blocks.
    """
    key = torch.arange(scores.shape[2])
    query = torch.arange(start, start + scores.shape[1])[:, None]
    kept = scores.where((key < query) & (key >= skip_keys), 0.0)
    return kept.square().sum((1, 2)) / n_cells


def exceeds_rounding(squares: Estimates, score_square: float | Float[Tensor, ""]) -> bool:
    """Return whether the mean square of a pattern exceeds what rounding may leave of it.

    One that is not a number does, so that it is not taken for 0.

    Args:
        squares: the estimates of the mean square, squared nats.
        score_square: the mean square of the scores, squared nats.
    """
    return not bool(squares[0].abs() <= ROUNDING**2 * score_square)


def beyond_rounding(squares: Estimates, score_square: float | Float[Tensor, ""]) -> Estimates:
    """Return the estimates of a mean square, or zeros where they do not exceed rounding."""
    return squares if exceeds_rounding(squares, score_square) else torch.zeros_like(squares)
