"""The theory of the parameter-free transformer with RoPE, resolved by frequency."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe import ParameterFreeSpec
from nope_probe.analyses.theory import attend, rope_frequencies


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
