"""The paper's closed forms for the second layer, corrected, and inner products at finite d.

Symbols: E = e^alpha; positions i and j count from 1 here, as in the paper, whose layer 2 is L1.
Inputs are unit vectors with expected inner product alpha between any two (eq. 2); everything is
float64.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

Alphas = Float[Tensor, " alpha"]
Positions = Int[Tensor, " pos"]
PerPosition = Float[Tensor, "alpha pos"]


def g(alpha: Alphas, i: Positions) -> PerPosition:
    """Return <x_i, x_j> after L0 for any j < i, which does not depend on j (section 3.2)."""
    a, e_a, i = _broadcast(alpha, i)
    return 2 * (2 * a * math.e + e_a * (1 + a * (2 * i - 3))) / (math.e + (i - 1) * e_a)


def h_squared(alpha: Alphas, i: Positions) -> PerPosition:
    """Return |x_i|^2 after L0 (eq. 3)."""
    a, e_a, i = _broadcast(alpha, i)
    own = 2 * math.e + (i - 1) * e_a
    others = (i - 1) * (1 + (i - 2) * a)
    squares = own**2 + 2 * own * e_a * a * (i - 1) + e_a**2 * others
    return squares / (math.e + (i - 1) * e_a) ** 2


def second_layer_scores(alpha: Alphas, n: int) -> Float[Tensor, "alpha query_pos key_pos"]:
    """Return the score map of L1, g(i) / (h(i) h(j)), NaN above the diagonal (eq. 4).

    Example:
        >>> second_layer_scores(torch.tensor([0.0]), 3)[0, 1:, :2]
        tensor([[0.1535, 1.0000],
                [0.1321, 0.1508]], dtype=torch.float64)
    """
    i = torch.arange(1, n + 1)
    h = h_squared(alpha, i).sqrt()
    scores = g(alpha, i)[..., None] / (h[..., :, None] * h[..., None, :])
    scores.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), torch.nan)


def validate_alphas(alpha: Alphas) -> None:
    """Check that expected inner products are in [0, 1).

    Raises:
        ValueError: naming them.
    """
    if not bool(((alpha >= 0) & (alpha < 1)).all()):
        raise ValueError(f"expected 0 <= alpha < 1, got {alpha.tolist()}")


def expected_cosine(alpha: Alphas, d_model: int) -> Alphas:
    """Return the exact E<y_i, y_j> of y = normalize(g_i + l g_0) at finite d, l^2 = a / (1 - a).

    Given the shared g_0 of length r, the mean of y is a vector of length c(l r), so the expectation
    is E c(l r)^2 over r ~ chi_d. It is below alpha by O(1/d).

    Raises:
        ValueError: for alpha outside [0, 1) or no dimensions.

    Example:
        >>> expected_cosine(torch.tensor([0.2, 0.5], dtype=torch.float64), 64)
        tensor([0.1985, 0.4971], dtype=torch.float64)
    """
    validate_alphas(alpha)
    if d_model < 1:
        raise ValueError(f"expected d_model >= 1, got {d_model}")
    r, density = _chi(d_model)
    alpha = alpha.double()[:, None]
    return (density * _mean_length(r * (alpha / (1 - alpha)).sqrt(), d_model) ** 2).sum(-1)


def _mean_length(m: Float[Tensor, "alpha r"], d: int) -> Float[Tensor, "alpha r"]:
    """Return c(m), the length of the mean of normalize(g + m e) for a unit vector e."""
    from scipy.special import gammaln, hyp1f1

    gain = math.exp(gammaln((d + 1) / 2) - gammaln(d / 2 + 1)) / math.sqrt(2)
    return gain * m * torch.from_numpy(hyp1f1(0.5, d / 2 + 1, -(m**2).numpy() / 2))


def _chi(d: int) -> tuple[Float[Tensor, " r"], Float[Tensor, " r"]]:
    """Return nodes and weights of the trapezoid rule in log r, for expectations over r ~ chi_d."""
    middle = math.sqrt(d)
    lowest = math.log(middle - 12) if middle > 13 else -40.0
    log_r = torch.linspace(lowest, math.log(middle + 12), 2001, dtype=torch.float64)
    log_density = d * log_r - (2 * log_r).exp() / 2
    return log_r.exp(), log_density.softmax(0)


def _broadcast(alpha: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    alpha = alpha.double()[:, None]
    return alpha, alpha.exp(), position.double()[None]
