"""The theory of the parameter-free transformer: closed forms and the mean field.

Inputs are unit vectors with expected inner product alpha between any two (eq. 2). All numbers are
float64.

The closed forms are those of the second layer (the paper's layer 2 is L1), corrected: E = e^alpha.
In them, positions i and j count from 1, as in the paper.

The mean field gives the scores of every layer without sampling. It carries the expected Gram
matrix G of the residual stream from layer to layer, as if attention were computed from G itself.
Its error is about 1/d. In L1 it equals eq. (4). One layer, with r = diag(G)^-1/2 and K the RoPE
kernel (1 without RoPE), computes:

    S = K o G o r r^T,   A = softmax(causal(S)),   M = A diag(r) + I,   G <- M G M^T
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from scipy.special import gammaln, hyp1f1
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.stages import ParameterFreeSpec

ROTARY_BASE = 10_000.0
INFINITE = ParameterFreeSpec()
Alphas = Float[Tensor, " alpha"]
Positions = Int[Tensor, " pos"]
PerPosition = Float[Tensor, "alpha pos"]
Square = Float[Tensor, "*batch query_pos key_pos"]


def g(alpha: Alphas, i: Positions) -> PerPosition:
    """Return <x_i, x_j> after L0, which is the same for all j < i (section 3.2)."""
    a, e_a, i = _broadcast(alpha, i)
    return 2 * (2 * a * math.e + e_a * (1 + a * (2 * i - 3))) / (math.e + (i - 1) * e_a)


def h_squared(alpha: Alphas, i: Positions) -> PerPosition:
    """Return |x_i|^2 after L0 (eq. 3)."""
    a, e_a, i = _broadcast(alpha, i)
    weight = 2 * math.e + (i - 1) * e_a
    others = (i - 1) * (1 + (i - 2) * a)
    squares = weight**2 + 2 * weight * e_a * a * (i - 1) + e_a**2 * others
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
        UserError: naming the alphas.
    """
    if not bool(((alpha >= 0) & (alpha < 1)).all()):
        raise UserError(f"expected 0 <= alpha < 1, got {alpha.tolist()}")


def expected_cosine(alpha: Alphas, d_model: int) -> Alphas:
    """Return the exact E<y_i, y_j> of y = normalize(g_i + l g_0) at finite d, l^2 = a / (1 - a).

    Given the shared g_0 of length r, the mean of y is a vector of length c(l r). The expectation is
    therefore E c(l r)^2 over r ~ chi_d. It is below alpha by O(1/d).

    Raises:
        UserError: for alpha outside [0, 1) or no dimensions.

    Example:
        >>> expected_cosine(torch.tensor([0.2, 0.5], dtype=torch.float64), 64)
        tensor([0.1985, 0.4971], dtype=torch.float64)
    """
    validate_alphas(alpha)
    if d_model < 1:
        raise UserError(f"expected d_model >= 1, got {d_model}")
    r, density = _chi(d_model)
    alpha = alpha.double()[:, None]
    return (density * _mean_length(r * (alpha / (1 - alpha)).sqrt(), d_model) ** 2).sum(-1)


def _mean_length(m: Float[Tensor, "alpha r"], d: int) -> Float[Tensor, "alpha r"]:
    """Return c(m), the length of the mean of normalize(g + m e) for a unit vector e."""
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


def expected_gram(
    alpha: Alphas, n: int, spec: ParameterFreeSpec
) -> Float[Tensor, "alpha pos pos2"]:
    """Return the expected Gram matrix of the normed inputs: 1, and off the diagonal E cos.

    E cos is alpha for infinite d, and `expected_cosine` at d (LayerNorm: d - 1) otherwise.
    """
    cosine = alpha.double()
    if spec.d_model is not None:
        cosine = expected_cosine(alpha, spec.d_model - spec.centred)
    off = cosine[:, None, None]
    return off + (1 - off) * torch.eye(n, dtype=torch.float64)


def mean_field(alpha: Alphas, n: int, n_layers: int, spec: ParameterFreeSpec) -> Iterator[Square]:
    """Yield the mean-field score map of each layer in turn, for a batch of alphas.

    Args:
        alpha: expected inner products of the inputs, 0 <= alpha < 1.
        n: positions.
        n_layers: layers.
        spec: the parameter-free transformer.

    Yields:
        Scores in nats, [alpha, query_pos, key_pos], float64; j > i is NaN if the mask is on.

    Raises:
        UserError: for an alpha outside [0, 1).

    Example:
        >>> *_, third = mean_field(torch.tensor([0.0]), 50, 3, ParameterFreeSpec())
        >>> third[0, 4, :5]
        tensor([0.2102, 0.2472, 0.2734, 0.2928, 1.0000], dtype=torch.float64)
    """
    validate_alphas(alpha)
    hidden = ~visible(n, spec.causal)
    for scores, _, _ in steps(expected_gram(alpha, n, spec), n_layers, spec):
        yield scores.masked_fill(hidden, torch.nan)


def steps(
    gram: Square, n_layers: int, spec: ParameterFreeSpec
) -> Iterator[tuple[Square, Square, Float[Tensor, "*batch pos pos2"]]]:
    """Carry the Gram matrix of the normed inputs through the layers.

    Args:
        gram: inner products of the normed inputs.
        n_layers: layers.
        spec: the parameter-free transformer.

    Yields:
        Per layer its scores (of every pair, masked or not), its mixing matrix M and the Gram
        matrix of its input.
    """
    kernel = rope_kernel(gram.shape[-1], spec)
    gram = spec.start_scale * gram
    for layer in range(n_layers):
        scores, mixing = attend(gram, kernel * gram, spec)
        yield scores, mixing, gram
        if layer < n_layers - 1:
            gram = mixing @ gram @ mixing.mT


def attend(gram: Square, rotated: Square, spec: ParameterFreeSpec) -> tuple[Square, Square]:
    """Return a layer's scores and its mixing matrix M, x <- M x.

    With scores over sqrt(d) the logits' variance does not vanish as d grows. The variance is
    (1 - cos^2)^2; half of it adds to the logarithm of the expected exponential off the diagonal.

    Args:
        gram: inner products of the layer's input vectors (centred for LayerNorm).
        rotated: the inner products with RoPE applied to both vectors.
        spec: the parameter-free transformer.
    """
    n = gram.shape[-1]
    r = gram.diagonal(dim1=-2, dim2=-1).rsqrt()
    cosine = rotated * (r[..., :, None] * r[..., None, :])
    scores = spec.score_scale * cosine
    logits = scores
    if spec.norm == "layernorm-sqrt-d":
        logits = scores + (1 - cosine**2) ** 2 / 2 * (1 - torch.eye(n, dtype=gram.dtype))
    attention = logits.masked_fill(~visible(n, spec.causal), -torch.inf).softmax(-1)
    mixing = spec.value_scale * attention * r[..., None, :] + torch.eye(n, dtype=gram.dtype)
    return scores, mixing


def rope_kernel(n: int, spec: ParameterFreeSpec) -> Float[Tensor, "query_pos key_pos"]:
    """Return K_ij = (2/d) sum_f cos((i - j) theta_f); 1 without RoPE.

    RoPE multiplies the mean inner product of isotropic vectors at positions i and j by K_ij.
    """
    if not spec.rope:
        return torch.ones(n, n, dtype=torch.float64)
    position = torch.arange(n, dtype=torch.float64)
    lag = position[:, None] - position[None, :]
    angles = rope_frequencies(spec.dimension)[:, None, None] * lag
    return angles.cos().mean(0)


def rope_frequencies(d_model: int) -> Float[Tensor, " frequency"]:
    """Return RoPE's frequencies theta_f = base^(-2f/d), in radians per position."""
    return ROTARY_BASE ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)


def visible(n: int, causal: bool) -> Bool[Tensor, "query_pos key_pos"]:
    """Return the cells of keys that each query attends to."""
    cells = torch.ones(n, n, dtype=torch.bool)
    return cells.tril() if causal else cells


def theory_scores(
    alpha: Alphas, n: int, n_layers: int, spec: ParameterFreeSpec = INFINITE
) -> Float[Tensor, "alpha layer query_pos key_pos"]:
    """Return the mean-field score maps of all layers.

    Args:
        alpha: expected inner products of the inputs, 0 <= alpha < 1.
        n: positions.
        n_layers: layers.
        spec: the parameter-free transformer; by default eq. (1) as d grows.

    Returns:
        Scores in nats, float64; NaN at j > i if the mask is on.

    Raises:
        UserError: for an alpha outside [0, 1).

    Example:
        >>> theory_scores(torch.tensor([0.0]), 50, 2)[0, 1, 2, 1]
        tensor(0.1508, dtype=torch.float64)
    """
    return torch.stack(list(mean_field(alpha, n, n_layers, spec)), 1)
