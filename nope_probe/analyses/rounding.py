"""Patterns as small as the rounding of the scores that they are in.

Where all tokens are equal, or a removed component had no effect, a pattern of the last digits is
left. It is the same in every fold, so that no noise hides it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import Estimates

# Of the RMS score. Models in float32 leave up to half of it (one token at all of 128 positions).
ROUNDING = 8 * torch.finfo(torch.float32).eps


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
