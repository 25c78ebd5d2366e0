"""Checks of the settings that `simulate` and `theory` share. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.errors import UserError
from nope_probe.hooks.names import Norm


def validate_alphas(alphas: Sequence[float]) -> None:
    """Check that expected inner products are in [0, 1).

    Raises:
        UserError: naming the first that is not.
    """
    for alpha in alphas:
        if not 0 <= alpha < 1:
            raise UserError(f"expected 0 <= alpha < 1, got {alpha:g}")


def make_spec(
    d_model: int | None, norm: Norm, rope: bool, causal: bool = True
) -> ParameterFreeSpec:
    """Return the variant of the parameter-free transformer.

    Raises:
        UserError: for a dimension that the norm or RoPE does not allow.
    """
    if d_model is not None and d_model < 2:
        raise UserError(f"expected at least 2 dimensions, got {d_model}")
    try:
        return ParameterFreeSpec(d_model=d_model, norm=norm, rope=rope, causal=causal)
    except ValueError as error:
        raise UserError(str(error)) from error
