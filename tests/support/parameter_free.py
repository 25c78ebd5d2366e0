"""Eq. (1), and its variants of appendix B and section 5.1, in float64; its theory by frequency."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe import ParameterFreeSpec
from nope_probe.analyses.theory import attend, rope_frequencies


def plain_layers(
    x: Tensor, n_layers: int, norm: str, rope: bool, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the scores of every layer [batch, layer, query, key], and the output of the last."""
    x, (n, d) = x.double(), x.shape[1:]
    theta = 10_000.0 ** (-2 * torch.arange(d // 2).double() / d)
    turn = torch.polar(torch.ones(n, d // 2).double(), torch.arange(n)[:, None] * theta)
    maps = []
    for _ in range(n_layers):
        if norm == "l2":
            y = x / x.norm(dim=-1, keepdim=True)
        else:
            y = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0)
        q = y
        if rope:
            z = torch.complex(y[..., : d // 2], y[..., d // 2 :]) * turn
            q = torch.cat([z.real, z.imag], -1)
        scores = q @ q.mT / {"l2": 1, "layernorm-sqrt-d": d**0.5, "layernorm-d": d}[norm]
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        maps.append(scores.masked_fill(scores.isinf(), torch.nan))
        x = scores.softmax(-1) @ y + x
    return torch.stack(maps, 1), x


def frequency_steps(
    gram: Float[Tensor, "*batch part frequency pos pos2"], n_layers: int, spec: ParameterFreeSpec
) -> Iterator[Float[Tensor, "*batch query_pos key_pos"]]:
    """Carry frequency-resolved Gram matrices through the layers, and yield each layer's scores.

    Args:
        gram: real and imaginary part of the mean of z_i conj(z_j) of the normed inputs, where
            z = x[f] + i x[f + d/2].
        n_layers: layers.
        spec: which parameter-free transformer, with RoPE.
    """
    position = torch.arange(gram.shape[-1], dtype=torch.float64)
    lag = position[:, None] - position[None, :]
    turn = rope_frequencies(spec.dimension)[:, None, None] * lag
    gram = spec.start_scale * gram
    for _ in range(n_layers):
        real, imaginary = gram.unbind(-4)
        rotated = (turn.cos() * real - turn.sin() * imaginary).sum(-3)
        scores, mixing = attend(real.sum(-3), rotated, spec)
        yield scores
        mixing = mixing[..., None, None, :, :]
        gram = mixing @ gram @ mixing.mT
