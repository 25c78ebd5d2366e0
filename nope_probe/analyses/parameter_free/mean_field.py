"""The mean field of the parameter-free transformer: scores of every layer, without sampling.

The expected Gram matrix G of the residual stream is carried from layer to layer as if attention
were computed from G itself: exact as d grows, with an error of about 1/d. L1, the paper's layer 2,
is eq. (4). One layer, with r = diag(G)^-1/2 and K the RoPE kernel (1 without RoPE):

    S = K o G o r r^T,   A = softmax(causal(S)),   M = A diag(r) + I,   G <- M G M^T
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.analyses.parameter_free.closed_form import expected_cosine, validate_alphas
from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec

ROTARY_BASE = 10_000.0
Alphas = Float[Tensor, " alpha"]
Square = Float[Tensor, "*batch query_pos key_pos"]


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
        spec: which parameter-free transformer.

    Yields:
        Scores in nats, [alpha, query_pos, key_pos], float64; j > i is NaN if the mask is on.

    Raises:
        ValueError: for an alpha outside [0, 1).

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
        spec: which parameter-free transformer.

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

    With scores over sqrt(d) the logits' variance does not vanish as d grows. It is (1 - cos^2)^2,
    and half of it adds to the logarithm of the expected exponential off the diagonal.

    Args:
        gram: inner products of the layer's input vectors (centred for LayerNorm).
        rotated: the same with RoPE applied to both vectors.
        spec: which parameter-free transformer.
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


def frequency_steps(
    gram: Float[Tensor, "*batch part frequency pos pos2"], n_layers: int, spec: ParameterFreeSpec
) -> Iterator[Square]:
    """Carry frequency-resolved Gram matrices, isotropic or not, through the layers.

    Args:
        gram: real and imaginary part of the mean of z_i conj(z_j) of the normed inputs, where
            z = x[f] + i x[f + d/2]. Memory and time grow as d n^2 and d n^3: for small n.
        n_layers: layers.
        spec: which parameter-free transformer, with RoPE.

    Yields:
        Scores of every pair, [*batch, query_pos, key_pos].
    """
    turn = _angles(gram.shape[-1], spec)
    gram = spec.start_scale * gram
    for _ in range(n_layers):
        real, imaginary = gram.unbind(-4)
        rotated = (turn.cos() * real - turn.sin() * imaginary).sum(-3)
        scores, mixing = attend(real.sum(-3), rotated, spec)
        yield scores
        mixing = mixing[..., None, None, :, :]
        gram = mixing @ gram @ mixing.mT


def rope_kernel(n: int, spec: ParameterFreeSpec) -> Float[Tensor, "query_pos key_pos"]:
    """Return K_ij = (2/d) sum_f cos((i - j) theta_f); 1 without RoPE.

    RoPE multiplies the mean inner product of isotropic vectors at positions i and j by K_ij.
    """
    if not spec.rope:
        return torch.ones(n, n, dtype=torch.float64)
    return _angles(n, spec).cos().mean(0)


def _angles(n: int, spec: ParameterFreeSpec) -> Float[Tensor, "frequency query_pos key_pos"]:
    """Return (i - j) theta_f, in radians."""
    position = torch.arange(n, dtype=torch.float64)
    lag = position[:, None] - position[None, :]
    return rope_frequencies(spec.dimension)[:, None, None] * lag


def rope_frequencies(d_model: int) -> Float[Tensor, " frequency"]:
    """Return RoPE's frequencies theta_f = base^(-2f/d), in radians per position."""
    return ROTARY_BASE ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)


def visible(n: int, causal: bool) -> Bool[Tensor, "query_pos key_pos"]:
    """Return which keys each query attends to."""
    cells = torch.ones(n, n, dtype=torch.bool)
    return cells.tril() if causal else cells
