"""Estimates from their values, and the edge contrast of whole maps."""

from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.maps.centred import KeptCells, first_visible_keys
from nope_probe.maps.estimates import Estimates, fold_weights


def estimates(
    values: Float[Tensor, " one_plus_folds"], counts: Int[Tensor, " fold"] | None = None
) -> Estimates:
    """Return estimates on all folds and without each fold, of folds of these sizes."""
    return Estimates(values=values, weights=fold_weights(len(values) - 1, counts))


def edge_contrast(maps: Tensor, skip_keys: int = 0) -> Tensor:
    """Return the mean over the first 5% of kept keys (one at least) less that over other keys."""
    first = first_visible_keys(maps).reshape(-1, maps.shape[-1]).amax(0)
    kept = KeptCells.of(first, skip_keys)
    cells = kept.rows(0, kept.n)
    first = cells.clone()
    first[:, kept.edge :] = False
    return maps[..., first].mean(-1) - maps[..., cells & ~first].mean(-1)
