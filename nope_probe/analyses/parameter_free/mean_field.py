"""The mean field of the parameter-free transformer: its scores at every layer, without sampling.

The expected Gram matrix G of the residual stream goes from layer to layer as if attention were
computed from G itself: exact as d grows, with an error of about 1/d. Layer 2 is eq. (4).
One step, with r = diag(G)^-1/2 and K the RoPE kernel (1 without RoPE):

    S = K o G o r r^T,   A = softmax(causal(S)),   M = A diag(r) + I,   G <- M G M^T
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.parameter_free.closed_form import expected_cosine
from nope_probe.hooks.names import Norm
from nope_probe.hooks.protocols import HookedModel

ROTARY_BASE = 10_000.0
Alphas = Float[Tensor, " alpha"]
Square = Float[Tensor, "*batch query_pos key_pos"]


@dataclass(frozen=True, kw_only=True)
class ParameterFreeSpec:
    """Which parameter-free transformer is meant.

    Attributes:
        d_model: the dimension; None for its limit, infinity (L2 norm without RoPE only).
        norm: `l2` (eq. 1) or LayerNorm with scores over sqrt(d) or d (appendix B).
        rope: whether queries and keys are rotated (base 10000).
        causal: whether keys j > i are masked; False is the encoder of Figure 10.

    Example:
        >>> from nope_probe import ParameterFreeSpec, theory_scores
        >>> spec = ParameterFreeSpec(d_model=64, rope=True)
        >>> theory_scores(torch.tensor([0.2]), 11, 3, spec).shape
        torch.Size([1, 3, 11, 11])
    """

    d_model: int | None = None
    norm: Norm = "l2"
    rope: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        if self.d_model is None and (self.norm != "l2" or self.rope):
            raise ValueError("only L2 norm without RoPE has a limit as d_model grows")
        if self.rope and self.dimension % 2:
            raise ValueError(f"RoPE turns pairs of coordinates: got an odd d_model {self.d_model}")
        if self.dimension < 1 + self.centred:
            raise ValueError(f"{self.norm} needs more dimensions than {self.d_model}")

    @property
    def dimension(self) -> int:
        """The dimension; 2 stands in for infinity, where nothing depends on it."""
        return 2 if self.d_model is None else self.d_model

    @property
    def centred(self) -> bool:
        """Whether vectors are centred first (LayerNorm): their cosines live in d - 1 dimensions."""
        return self.norm != "l2"

    @property
    def value_scale(self) -> float:
        """The length of a normed vector: 1, or sqrt(d) for LayerNorm."""
        return self.dimension**0.5 if self.centred else 1.0

    @property
    def score_scale(self) -> float:
        """What a cosine is multiplied with to give a score."""
        return self.dimension**0.5 if self.norm == "layernorm-sqrt-d" else 1.0

    @property
    def start_scale(self) -> float:
        """The expected squared length of a centred unit vector."""
        return (self.dimension - 1) / self.dimension if self.centred else 1.0


def spec_of(model: HookedModel) -> ParameterFreeSpec:
    """Read off a parameter-free model which field describes it."""
    cfg = model.cfg
    sqrt_d = cfg.normalization_type == "LNPre" and cfg.attn_scale < cfg.d_model
    layernorm: Norm = "layernorm-sqrt-d" if sqrt_d else "layernorm-d"
    return ParameterFreeSpec(
        d_model=cfg.d_model,
        norm="l2" if cfg.normalization_type == "RMSPre" else layernorm,
        rope=cfg.positional_embedding_type == "rotary",
        causal=cfg.attention_dir == "causal",
    )


def expected_gram(
    alpha: Alphas, n: int, field: ParameterFreeSpec
) -> Float[Tensor, "alpha pos pos2"]:
    """Give the expected Gram matrix of the normed inputs: 1, and off the diagonal E cos.

    E cos is alpha for infinite d, and `expected_cosine` at d (LayerNorm: d - 1) otherwise.
    """
    cosine = alpha.double()
    if field.d_model is not None:
        cosine = expected_cosine(alpha, field.d_model - field.centred)
    off = cosine[:, None, None]
    return off + (1 - off) * torch.eye(n, dtype=torch.float64)


def mean_field(alpha: Alphas, n: int, n_layers: int, field: ParameterFreeSpec) -> Iterator[Square]:
    """Give the mean-field score map of each layer in turn, for a batch of alphas.

    Args:
        alpha: expected inner products of the inputs, 0 <= alpha < 1.
        n: positions.
        n_layers: layers.
        field: which parameter-free transformer.

    Yields:
        Scores in nats, [alpha, query_pos, key_pos], float64; j > i is NaN if the mask is on.

    Raises:
        ValueError: for an alpha outside [0, 1).

    Example:
        >>> *_, third = mean_field(torch.tensor([0.0]), 50, 3, ParameterFreeSpec())
        >>> third[0, 4, :5]
        tensor([0.2102, 0.2472, 0.2734, 0.2928, 1.0000], dtype=torch.float64)
    """
    _check_alpha(alpha)
    hidden = ~visible(n, field.causal)
    for scores, _, _ in steps(expected_gram(alpha, n, field), n_layers, field):
        yield scores.masked_fill(hidden, torch.nan)


def steps(
    gram: Square, n_layers: int, field: ParameterFreeSpec
) -> Iterator[tuple[Square, Square, Float[Tensor, "*batch pos pos2"]]]:
    """Follow the Gram matrix of the normed inputs through the layers.

    Yields:
        Per layer: its scores (of every pair, masked or not), its mixing M and the Gram matrix of
        its input.
    """
    kernel = rope_kernel(gram.shape[-1], field)
    gram = field.start_scale * gram
    for layer in range(n_layers):
        scores, mixing = attend(gram, kernel * gram, field)
        yield scores, mixing, gram
        if layer < n_layers - 1:
            gram = mixing @ gram @ mixing.mT


def attend(gram: Square, rotated: Square, field: ParameterFreeSpec) -> tuple[Square, Square]:
    """Give a layer's scores and what its output is made of, x <- M x.

    Args:
        gram: inner products of the layer's input vectors (centred for LayerNorm).
        rotated: the same with RoPE applied to both vectors.
        field: which parameter-free transformer.

    With scores over sqrt(d) the logits' variance does not vanish as d grows. It is (1 - cos^2)^2,
    and half of it adds to the logarithm of the expected exponential off the diagonal.
    """
    n = gram.shape[-1]
    r = gram.diagonal(dim1=-2, dim2=-1).rsqrt()
    cosine = rotated * (r[..., :, None] * r[..., None, :])
    scores = field.score_scale * cosine
    logits = scores
    if field.norm == "layernorm-sqrt-d":
        logits = scores + (1 - cosine**2) ** 2 / 2 * (1 - torch.eye(n, dtype=gram.dtype))
    attention = logits.masked_fill(~visible(n, field.causal), -torch.inf).softmax(-1)
    mixing = field.value_scale * attention * r[..., None, :] + torch.eye(n, dtype=gram.dtype)
    return scores, mixing


def frequency_steps(
    gram: Float[Tensor, "*batch part frequency pos pos2"], n_layers: int, field: ParameterFreeSpec
) -> Iterator[Square]:
    """Follow frequency-resolved Gram matrices through the layers, whatever their imbalance.

    Args:
        gram: real and imaginary part of the mean of z_i conj(z_j) of the normed inputs, where
            z = x[f] + i x[f + d/2]. Memory and time grow as d n^2 and d n^3: for small n.
        n_layers: layers.
        field: which parameter-free transformer, with RoPE.

    Yields:
        Scores of every pair, [*batch, query_pos, key_pos].
    """
    turn = _angles(gram.shape[-1], field)
    gram = field.start_scale * gram
    for _ in range(n_layers):
        real, imaginary = gram.unbind(-4)
        rotated = (turn.cos() * real - turn.sin() * imaginary).sum(-3)
        scores, mixing = attend(real.sum(-3), rotated, field)
        yield scores
        mixing = mixing[..., None, None, :, :]
        gram = mixing @ gram @ mixing.mT


def rope_kernel(n: int, field: ParameterFreeSpec) -> Float[Tensor, "query_pos key_pos"]:
    """Give what RoPE multiplies the mean inner product of isotropic vectors with (1 without RoPE).

    K_ij = (2/d) sum_f cos((i - j) theta_f).
    """
    if not field.rope:
        return torch.ones(n, n, dtype=torch.float64)
    return _angles(n, field).cos().mean(0)


def _angles(n: int, field: ParameterFreeSpec) -> Float[Tensor, "frequency query_pos key_pos"]:
    """Give (i - j) theta_f."""
    position = torch.arange(n, dtype=torch.float64)
    lag = position[:, None] - position[None, :]
    return rope_frequencies(field.dimension)[:, None, None] * lag


def rope_frequencies(d_model: int) -> Float[Tensor, " frequency"]:
    """Give RoPE's theta_f = base^(-2f/d)."""
    return ROTARY_BASE ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)


def visible(n: int, causal: bool) -> Tensor:
    """Tell which keys a query sees."""
    cells = torch.ones(n, n, dtype=torch.bool)
    return cells.tril() if causal else cells


def _check_alpha(alpha: Tensor) -> None:
    if not bool(((alpha >= 0) & (alpha < 1)).all()):
        raise ValueError(f"expected 0 <= alpha < 1, got {alpha.tolist()}")
