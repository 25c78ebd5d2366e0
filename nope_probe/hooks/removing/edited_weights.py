"""The same model with untrained weights while a context lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.objects import Model, model_of

_REDRAWN: WeakKeyDictionary[HookedModel, object] = WeakKeyDictionary()
STD = 0.02  # initializer_range of transformers' Llama, GPT-2, Qwen, Phi and most others


@contextmanager
def untrained(model: Model, seed: int = 0) -> Iterator[Any]:
    """Draw a model's weights anew for as long as the context lasts.

    Matrices become Gaussian with a standard deviation of 0.02, norm weights ones and biases zeros.
    Parameters that are all zero, such as the positions of a HookedTransformer without position
    encoding, stay zero. The trained weights wait in main memory. The passes of all threads run the
    untrained model.

    Args:
        model: a HookedTransformer or TransformerBridge, or what `load` returns; bit-identical
            afterwards.
        seed: the seed of the draws.

    Raises:
        UserError: inside another `untrained` on this model.

    Example:
        >>> from nope_probe import load, untrained
        >>> loaded, tokens = load("rope-tiny", n_layers=1), torch.tensor([[0, 5, 9]])
        >>> with untrained(loaded) as model:
        ...     bool(model(tokens).std() < 1)
        True
    """
    model = model_of(model)
    generator = torch.Generator().manual_seed(seed)
    with _restored(model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_drawn(name, parameter, generator))
        yield model


@contextmanager
def _restored(model: HookedModel) -> Iterator[None]:
    """Restore a model's weights at the end, from copies in main memory."""
    mine = object()
    if _REDRAWN.setdefault(model, mine) is not mine:
        raise UserError("the model is untrained already: leave the other `untrained` first")
    saved = [(weight, weight.detach().cpu().clone()) for weight in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in saved:
                weight.copy_(value)
        _REDRAWN.pop(model, None)


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    last = name.rpartition(".")[2].lstrip("_")
    if not parameter.any() or last.startswith("b"):  # bias, b_Q, b, ...
        return torch.zeros_like(parameter)
    if parameter.ndim == 1:
        return torch.ones_like(parameter)
    return STD * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
