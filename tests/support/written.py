"""Written position by its definition: means over the other texts of a half."""

import torch
from torch import Tensor


def of_others(outputs: Tensor, kept: int, half: Tensor | None = None) -> Tensor:
    """Return what each text loses of the outputs: what the other texts of its half show."""
    counts, rows = counted(outputs, kept), torch.arange(len(outputs))
    half = rows % 2 if half is None else half
    others = [(rows != row) & (half == half[row]) for row in rows]
    return torch.stack([_about_mean(outputs[of], counts[of], kept) for of in others])


def of_all(outputs: Tensor, kept: int) -> Tensor:
    """Return what a new text loses of the outputs: what all texts show."""
    return _about_mean(outputs, counted(outputs, kept), kept)


def counted(outputs: Tensor, kept: int) -> Tensor:
    """Return 1 for outputs that count, 0 for massive ones where a position has few of them."""
    norm = outputs.norm(dim=-1)
    counts = (norm <= 4 * norm[:, kept:].median()).float()
    counts[:, counts.mean(0) < 0.5] = 1.0
    return counts


def _about_mean(outputs: Tensor, counts: Tensor, kept: int) -> Tensor:
    """Return the mean output that counts at each position, less its mean over later positions."""
    total = (outputs * counts[..., None]).sum(0)
    mean = total / counts.sum(0).clamp(min=1)[:, None]
    written = mean - mean[kept:].mean(0)
    written[:kept] = 0
    return written
