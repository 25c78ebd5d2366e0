"""The `theory` command: the alpha above which each layer increases in j, from the mean field."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.components import Norm
from nope_probe.experiments.simulation.run import DIMENSION
from nope_probe.runtime.places import validate_memory
from nope_probe.runtime.settings import ALPHA, LARGEST, LAYERS, BoundedSettings, Bounds

N_ALPHAS = 17  # alphas of the grid
N_LIVE = 11  # maps of each alpha in memory at a time, as measured


@dataclass(frozen=True, kw_only=True)
class Settings(BoundedSettings):
    """Find for each layer the alpha below which its scores do not increase in the key position j.

    Uses the mean field, which is exact as d_model grows, and no sampling. With --alpha, the
    smallest step S[i, j+1] - S[i, j] of each layer is printed as well.
    """

    seq_len: Annotated[int, Bounds(3, LARGEST), tyro.conf.arg(help="Positions.")] = 50
    n_layers: Annotated[int, LAYERS, tyro.conf.arg(help="Layers.")] = 10
    alpha: Annotated[
        tuple[float, ...], ALPHA, tyro.conf.arg(help="Alphas at which to print the smallest steps.")
    ] = ()
    d_model: Annotated[
        int | None, DIMENSION, tyro.conf.arg(help="Dimension; infinite if not given.")
    ] = None
    norm: Annotated[Norm, tyro.conf.arg(help="Norm of the residual stream.")] = "l2"
    rope: Annotated[bool, tyro.conf.arg(help="Rotate queries and keys.")] = False


def print_critical_alphas(settings: Settings) -> None:
    """Print each layer's critical alpha, and its smallest step at the given alphas.

    Raises:
        UserError: for settings that are not possible.
    """
    spec = ParameterFreeSpec(d_model=settings.d_model, norm=settings.norm, rope=settings.rope)
    n_maps = N_LIVE * max(N_ALPHAS, len(settings.alpha))
    validate_memory(8 * n_maps * settings.seq_len**2, "--seq-len")
    import torch
    from tqdm import tqdm

    from nope_probe.analyses.parameter_free.theory import (
        critical_alphas,
        n_rounds,
        smallest_steps,
    )

    n, n_layers = settings.seq_len, settings.n_layers
    with tqdm(total=n_rounds(1e-5), desc="alphas", leave=False) as bar:
        critical = critical_alphas(n, n_layers, spec, on_round=bar.update).tolist()
    alphas = torch.tensor(settings.alpha, dtype=torch.float64)
    steps = smallest_steps(alphas, n, n_layers, spec).T.tolist() if settings.alpha else []
    for layer, value in enumerate(critical):
        sys.stdout.write(f"L{layer}: {_sentence(value)}\n")
        for alpha, step in zip(settings.alpha, steps[layer] if steps else [], strict=True):
            sys.stdout.write(f"  alpha = {alpha:g}: smallest step {step:+.2e}\n")
    sys.stdout.write(_summary(critical, n) + "\n")


def _sentence(critical: float) -> str:
    if math.isnan(critical):
        return "does not increase in j at any alpha"
    if critical == 0:
        return "increases in j at every alpha"
    return f"increases in j above alpha = {critical:.4f}, not below"


def _summary(critical: list[float], n: int) -> str:
    later = critical[1:]
    if not later:
        return f"n = {n}: L0 is flat; the pattern begins in L1"
    if any(map(math.isnan, later)):
        return f"n = {n}: a layer after the first does not increase in j at any alpha"
    return f"n = {n}: L1 to L{len(critical) - 1} all increase in j above alpha = {max(later):.4f}"
