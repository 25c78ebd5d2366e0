"""Checks of the settings that `simulate` and `theory` share. No torch."""

from __future__ import annotations

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.components import Norm
from nope_probe.errors import UserError
from nope_probe.runtime.settings import Bounds

DIMENSION = Bounds(2, 2**16)  # the series in d takes as long as d is large


def make_spec(
    d_model: int | None, norm: Norm, rope: bool, causal: bool = True
) -> ParameterFreeSpec:
    """Return the variant of the parameter-free transformer.

    Raises:
        UserError: for a dimension that the norm or RoPE does not allow.
    """
    try:
        return ParameterFreeSpec(d_model=d_model, norm=norm, rope=rope, causal=causal)
    except ValueError as error:
        raise UserError(str(error)) from error
