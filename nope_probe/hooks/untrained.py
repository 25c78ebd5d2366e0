"""The same model with random weights, as before training, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nope_probe.hooks.protocols import Model

STD = 0.02  # initializer_range of transformers' Llama, GPT-2, Qwen, Phi and most others


@contextmanager
def untrained(model: Model, seed: int = 0) -> Iterator[Model]:
    """Draw a model's weights anew for as long as the context lasts.

    Matrices become Gaussian with a standard deviation of 0.02, vectors that scale (norm weights)
    ones and biases zeros. What is zero throughout, such as the positions of a HookedTransformer
    without position encoding, stays zero. The trained weights wait in main memory.

    Args:
        model: a HookedTransformer or TransformerBridge; bit-identical afterwards.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = [(parameter, parameter.detach().cpu().clone()) for _, parameter in _weights(model)]
    try:
        with torch.no_grad():
            for name, parameter in _weights(model):
                parameter.copy_(_drawn(name, parameter, generator))
        yield model
    finally:
        with torch.no_grad():
            for parameter, before in trained:
                parameter.copy_(before)


def _weights(model: Model) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return iter(model.named_parameters())


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    last = name.rpartition(".")[2].lstrip("_")
    if not parameter.any() or last.startswith("b"):  # bias, b_Q, b, ...
        return torch.zeros_like(parameter)
    if parameter.ndim == 1:
        return torch.ones_like(parameter)
    return STD * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
