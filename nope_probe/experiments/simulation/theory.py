"""Ask the theory at which alpha each layer of the parameter-free transformer increases in j."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from nope_probe.errors import UserError
from nope_probe.hooks.names import Norm


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Say for each layer below which alpha its scores do not increase in the key position j.

    It is the mean field that is asked: exact as d_model grows, no sampling. With --alpha, the
    smallest step S[i, j+1] - S[i, j] of each layer is printed as well.
    """

    seq_len: Annotated[int, tyro.conf.arg(help="Positions.")] = 50
    n_layers: Annotated[int, tyro.conf.arg(help="Layers.")] = 10
    alpha: Annotated[tuple[float, ...], tyro.conf.arg(help="Alphas to look at.")] = ()
    d_model: Annotated[int | None, tyro.conf.arg(help="Dimension; none is infinity.")] = None
    norm: Annotated[Norm, tyro.conf.arg(help="What normalises the residual stream.")] = "l2"
    rope: Annotated[bool, tyro.conf.arg(help="Rotate queries and keys.")] = False


def print_critical_alphas(settings: Settings) -> None:
    """Print each layer's critical alpha, and its smallest step at the alphas asked for."""
    _check(settings)
    import torch
    from tqdm import tqdm

    from nope_probe.analyses.parameter_free.critical_alpha import (
        critical_alphas,
        n_rounds,
        smallest_steps,
    )
    from nope_probe.analyses.parameter_free.mean_field import ParameterFreeSpec

    n, n_layers = settings.seq_len, settings.n_layers
    field = ParameterFreeSpec(d_model=settings.d_model, norm=settings.norm, rope=settings.rope)
    with tqdm(total=n_rounds(1e-5), desc="alphas", leave=False) as bar:
        critical = critical_alphas(n, n_layers, field, on_round=bar.update).tolist()
    alphas = torch.tensor(settings.alpha, dtype=torch.float64)
    steps = smallest_steps(alphas, n, n_layers, field).T.tolist() if settings.alpha else []
    for layer, value in enumerate(critical):
        sys.stdout.write(f"L{layer}: {_answer(value)}\n")
        for alpha, step in zip(settings.alpha, steps[layer] if steps else [], strict=True):
            sys.stdout.write(f"  alpha = {alpha:g}: smallest step {step:+.2e}\n")
    sys.stdout.write(_summary(critical, n) + "\n")


def _check(settings: Settings) -> None:
    if settings.seq_len < 3 or settings.n_layers < 1:
        raise UserError(
            "expected at least 3 positions and 1 layer, "
            f"got {settings.seq_len} and {settings.n_layers}"
        )
    for alpha in settings.alpha:
        if not 0 <= alpha < 1:
            raise UserError(f"expected 0 <= alpha < 1, got {alpha:g}")
    if settings.d_model is None and (settings.rope or settings.norm != "l2"):
        raise UserError("RoPE and LayerNorm depend on the dimension: give --d-model")
    if settings.d_model is not None and settings.d_model < 2:
        raise UserError(f"expected at least 2 dimensions, got {settings.d_model}")
    if settings.rope and (settings.d_model or 0) % 2:
        raise UserError(f"RoPE turns pairs of coordinates: {settings.d_model} is odd")


def _answer(critical: float) -> str:
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
        return f"n = {n}: some layer after the first does not increase in j at any alpha"
    return f"n = {n}: L1 to L{len(critical) - 1} all increase in j above alpha = {max(later):.4f}"
