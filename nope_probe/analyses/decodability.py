"""Targets of the regression of a position's index on the residual stream, and what chance gives."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor


def index_targets(
    n_seqs: int, seq_len: int, skip: int, generator: Generator
) -> Float[Tensor, "seq pos target"]:
    """Return each position's index, and as control the indices permuted within each sequence.

    Args:
        n_seqs: how many sequences.
        seq_len: positions in each.
        skip: how many first positions are left out, and stay where they are.
        generator: of the permutations.
    """
    index = torch.arange(seq_len, dtype=torch.float64).expand(n_seqs, seq_len)
    order = torch.rand(n_seqs, seq_len - skip, generator=generator).argsort(-1)
    shuffled = torch.cat([index[:, :skip], index[:, skip:].gather(1, order)], 1)
    return torch.stack([index, shuffled], -1)


def chance_distance(seq_len: int, skip: int) -> float:
    """Return the mean absolute distance of the middle index from all: what a constant achieves.

    Example:
        >>> chance_distance(5, 0), chance_distance(5, 1)
        (1.2, 1.0)
    """
    index = torch.arange(skip, seq_len, dtype=torch.float64)
    return float((index - index.mean()).abs().mean())


def halves(documents: Int[Tensor, " seq"]) -> tuple[Int[Tensor, " fit"], Int[Tensor, " held_out"]]:
    """Return the sequences to fit on and those to evaluate on; no document is in both.

    Every other document, in the order of their numbers, is held out.
    """
    place = documents.unique(return_inverse=True)[1]
    held_out = place % 2 == 1
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()
