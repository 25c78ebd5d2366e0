"""Estimates from their values."""

from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps.estimates import Estimates, fold_weights


def estimates(
    values: Float[Tensor, " one_plus_folds"], counts: Int[Tensor, " fold"] | None = None
) -> Estimates:
    """Return estimates on all folds and without each fold, of folds of these sizes."""
    return Estimates(values=values, weights=fold_weights(len(values) - 1, counts))
