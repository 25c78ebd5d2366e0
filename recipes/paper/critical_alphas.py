"""From which alpha on the scores of each layer increase in j, by the mean field."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.theory import INFINITE, Alphas, mean_field
from nope_probe.stages import ParameterFreeSpec

HIGHEST_ALPHA = 0.99


def smallest_step(
    scores: Float[Tensor, "*batch query_pos key_pos"],
) -> Float[Tensor, "*batch"]:
    """Return the smallest S[i, j+1] - S[i, j] with j < i: positive if the map increases in j."""
    step = scores[..., 1:] - scores[..., :-1]
    inside = torch.ones(step.shape[-2:], dtype=torch.bool).tril(-1)
    return step[..., inside].amin(-1)


def smallest_steps(
    alpha: Alphas, n: int, n_layers: int, spec: ParameterFreeSpec = INFINITE
) -> Float[Tensor, "alpha layer"]:
    """Return each layer's smallest step in j, holding only one layer's map at a time."""
    return torch.stack([smallest_step(s) for s in mean_field(alpha, n, n_layers, spec)], -1)


def critical_alphas(
    n: int,
    n_layers: int,
    spec: ParameterFreeSpec = INFINITE,
    *,
    tolerance: float = 1e-5,
    on_round: Callable[[], object] = lambda: None,
) -> Float[Tensor, " layer"]:
    """Find for each layer the alpha below which its scores do not increase in j.

    Bisection refines the largest alpha on a grid (denser near 0) at which a layer does not
    increase. Section 4.1 claims an increase at alpha = 0 for layers 3 and 4 (L2 and L3); this
    claim is false.

    Args:
        n: positions, 2 at least.
        n_layers: layers.
        spec: the parameter-free transformer; by default eq. (1) as d grows.
        tolerance: width of the final bracket.
        on_round: called after each of the `n_rounds(tolerance)` rounds.

    Returns:
        The alphas: 0 where the layer always increases, NaN where it does not even at alpha = 0.99
        (L0 is constant for j < i).

    Example:
        >>> critical_alphas(50, 3)
        tensor([   nan, 0.0000, 0.0104], dtype=torch.float64)
    """
    low, high, never, always = _brackets(n, n_layers, spec)
    on_round()
    for _ in range(n_rounds(tolerance) - 1):
        middle = (low + high) / 2
        falls = smallest_steps(middle, n, n_layers, spec).diagonal() <= 0
        low, high = torch.where(falls, middle, low), torch.where(falls, high, middle)
        on_round()
    return torch.where(never, torch.nan, torch.where(always, 0.0, high))


def _brackets(
    n: int, n_layers: int, spec: ParameterFreeSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the grid's alphas around each layer's critical alpha, and whether it is none or 0."""
    grid = _grid()
    falls = smallest_steps(grid, n, n_layers, spec) <= 0
    above = torch.stack([_first_after(falls[:, layer]) for layer in range(n_layers)])
    never, always = above == len(grid), above == 0
    low = torch.where(always | never, 0.0, grid[(above - 1).clamp_min(0)])
    high = torch.where(always | never, 0.0, grid[above.clamp_max(len(grid) - 1)])
    return low, high, never, always


def n_rounds(tolerance: float) -> int:
    """Return how many times `critical_alphas` runs the mean field over all layers."""
    grid = _grid()
    widest = float((grid[1:] - grid[:-1]).max())
    return 1 + max(0, int(torch.tensor(widest / tolerance).log2().ceil()))


def _grid() -> Tensor:
    return HIGHEST_ALPHA * torch.linspace(0, 1, 17, dtype=torch.float64) ** 2


def _first_after(falls: Tensor) -> Tensor:
    """Return the index after the last alpha at which a layer does not increase."""
    return (falls * torch.arange(1, len(falls) + 1)).amax()
