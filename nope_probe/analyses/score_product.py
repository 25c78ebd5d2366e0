"""Recover scale and soft cap from scores and the products q.k that they come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

LINEAR = 1e-4  # relative error up to which scores are a multiple of q.k


@dataclass(frozen=True, kw_only=True)
class ScoreProduct:
    """A score as c tanh(scale q.k / c), or scale q.k without a soft cap c.

    Attributes:
        scale: the factor of q.k.
        soft_cap: c, nats, or None.
        error: the largest difference to the scores, relative to the largest score.
    """

    scale: float
    soft_cap: float | None
    error: float


def fit_score_product(
    products: Float[Tensor, " cell"], scores: Float[Tensor, " cell"]
) -> ScoreProduct:
    """Return scale and soft cap by least squares.

    A soft cap shows only if some scores come near it; without one, `error` is 1e-4 at most.

    Args:
        products: q.k of some cells, from small to large.
        scores: what the block feeds to softmax there, nats.

    Example:
        >>> products = torch.linspace(-9, 9, 19).double()
        >>> fit = fit_score_product(products, 5 * torch.tanh(0.5 * products / 5))
        >>> round(fit.scale, 6), round(fit.soft_cap, 6)
        (0.5, 5.0)
    """
    x, y = products.double(), scores.double()
    largest = float(y.abs().max())
    if largest == 0 or not x.any():
        return ScoreProduct(scale=0.0, soft_cap=None, error=float(largest > 0))
    scale = float((x @ y) / (x @ x))
    error = float((scale * x - y).abs().max()) / largest
    if error <= LINEAR:
        return ScoreProduct(scale=scale, soft_cap=None, error=error)
    scale, cap = _fit_cap(x.numpy(), y.numpy())
    fitted = cap * torch.tanh(scale * x / cap)
    return ScoreProduct(scale=scale, soft_cap=cap, error=float((fitted - y).abs().max()) / largest)


def _fit_cap(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    from scipy.optimize import curve_fit

    small = np.abs(x) <= np.quantile(np.abs(x), 0.1)
    slope = float((x[small] @ y[small]) / (x[small] @ x[small]))

    def capped(x: np.ndarray, scale: float, cap: float) -> np.ndarray:
        return cap * np.tanh(scale * x / cap)

    (scale, cap), _ = curve_fit(capped, x, y, p0=(slope, np.abs(y).max()), xtol=1e-12, ftol=1e-12)
    return float(scale), float(cap)
