"""Samples of the parameter-free transformer's inputs, the same for every chunk size."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 64


def sample_inputs(
    start: int, stop: int, *, alpha: float, seq_len: int, d_model: int, seed: int
) -> Float[Tensor, "sample pos d_model"]:
    """Return the samples start <= s < stop: unit vectors with E<x_i, x_j> near alpha (eq. 2).

    Each vector is Gaussian noise of its own plus l times noise that its sample shares,
    l^2 = alpha / (1 - alpha), normalised. Noise is seeded per block of 64 samples, so that sample s
    of a seed is the same in every run; all alphas share the noise.

    Raises:
        ValueError: for alpha outside [0, 1) or a negative seed.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"expected 0 <= alpha < 1, got {alpha}")
    blocks = range(start // BLOCK, -(-stop // BLOCK))
    noise = torch.cat([_noise(seed, block, seq_len, d_model) for block in blocks])
    noise = noise[start - blocks.start * BLOCK : stop - blocks.start * BLOCK]
    x = noise[:, 1:]
    if alpha > 0:
        x = x + (alpha / (1 - alpha)) ** 0.5 * noise[:, :1]
    return torch.nn.functional.normalize(x, dim=-1)


def _noise(seed: int, block: int, seq_len: int, d_model: int) -> Tensor:
    """Return a block's noise; position 0 is the shared part."""
    # The generator takes 32 bits: with an odd stride all blocks of a run have different seeds.
    (base,) = np.random.SeedSequence(seed).generate_state(1).tolist()
    generator = torch.Generator().manual_seed((base + block * 0x9E3779B1) % 2**32)
    return torch.randn(BLOCK, seq_len + 1, d_model, generator=generator)
