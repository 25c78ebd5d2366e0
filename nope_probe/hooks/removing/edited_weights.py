"""The same model with other weights while a context lasts: in another basis, or untrained.

W_Q and W_K are defined only up to an invertible map per key head that commutes with RoPE, W_V and
W_O up to any invertible map. A statement about a single matrix should hold in every such basis. A
statement about the circuits (W_Q with W_K, W_V with W_O) does so by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from nope_probe.components import WEIGHTS, Projection
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Model
from nope_probe.hooks.layers.model import layers_of, traits_of
from nope_probe.hooks.layers.rotation import Rotary
from nope_probe.hooks.layers.threads import used_alone

SPREAD = 0.5  # standard deviation of the logarithm of the factors


@contextmanager
def reparametrised(model: Model, generator: Generator) -> Iterator[Model]:
    """Rewrite a model's weights in a random basis for as long as the context lasts.

    Per key head, q and k are turned and stretched by one complex number per rotary pair (k by the
    inverse), v and o by a random invertible matrix. Blocks with q/k-norm keep their q and k,
    because the norm stands between q, k and the scores. The weights are restored bit by bit.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.removing.edited_weights import reparametrised
        >>> model = load("rope-tiny").model
        >>> with reparametrised(model, torch.Generator().manual_seed(0)):
        ...     logits = model(torch.tensor([[0, 5, 9]]))
    """
    layers, traits = layers_of(model), traits_of(model)
    views = (view for layer in layers for view in _rewritten(layer))
    with used_alone(model), _restored(views):
        with torch.no_grad():
            for layer in layers:
                _reparametrise(layer, traits[layer.index].rotary, generator)
        yield model


@contextmanager
def _restored(weights: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of weights at the end, from copies in main memory."""
    saved = [(weight, weight.detach().cpu().clone()) for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in saved:
                weight.copy_(value)


def _reparametrise(layer: Layer, rotary: Rotary | None, generator: Generator) -> None:
    n_heads, d = layer.n_kv_heads, layer.d_head
    if not layer.has_qk_norm:
        pairs = None if rotary is None else rotary.pairs
        turn = complex_map(n_heads, d, generator, pairs)
        _multiply(layer, "w_q", turn)
        _multiply(layer, "w_k", torch.linalg.inv(turn).mT)
    basis = invertible_map(n_heads, d, generator)
    _multiply(layer, "w_v", basis)
    _multiply(layer, "w_o", torch.linalg.inv(basis))


def complex_map(
    n_heads: int,
    d_head: int,
    generator: Generator,
    pairs: Int[Tensor, "pair two"] | None = None,
) -> Float[Tensor, "head d_head d_head"]:
    """Draw per head one complex number for each rotary pair, as a matrix that acts on rows.

    Coordinates that RoPE does not turn are paired by halves; without `pairs`, all coordinates are.
    """
    turned = torch.empty(0, 2, dtype=torch.long) if pairs is None else pairs
    rest = torch.tensor([coordinate for coordinate in range(d_head) if coordinate not in turned])
    maps = torch.eye(d_head, dtype=torch.float64).repeat(n_heads, 1, 1)
    for first, second in (turned.T, rest[: len(rest) // 2 * 2].long().view(2, -1)):
        size = torch.exp(SPREAD * torch.randn(n_heads, len(first), generator=generator).double())
        angle = 2 * torch.pi * torch.rand(n_heads, len(first), generator=generator).double()
        maps[:, first, first] = maps[:, second, second] = size * angle.cos()
        maps[:, first, second] = size * angle.sin()
        maps[:, second, first] = -size * angle.sin()
    return maps


def invertible_map(
    n_heads: int, d_head: int, generator: Generator
) -> Float[Tensor, "head d_head d_head"]:
    """Draw a random invertible matrix per head, of moderate condition number."""
    left, right = (
        torch.linalg.qr(torch.randn(n_heads, d_head, d_head, generator=generator).double()).Q
        for _ in range(2)
    )
    sizes = torch.exp(SPREAD * torch.randn(n_heads, d_head, generator=generator).double())
    return left * sizes[:, None, :] @ right


def _multiply(layer: Layer, name: Projection, maps: Float[Tensor, "kv_head d_head d_head"]) -> None:
    """Multiply a projection on the side of the heads: x W M for q, k and v, z M W for o."""
    weight = layer.weight_per_head(name)
    if name in ("w_q", "w_o"):
        maps = maps.repeat_interleave(layer.n_heads // layer.n_kv_heads, 0)
    maps = maps.to(weight.device)
    if name == "w_o":
        weight.copy_(maps @ weight.double())
        return
    weight.copy_(weight.double() @ maps)
    bias = layer.bias_per_head(name)
    if bias is not None:
        bias.copy_(torch.einsum("nh,nhg->ng", bias.double(), maps))


def _rewritten(layer: Layer) -> Iterator[Tensor]:
    """Yield views of the weights and biases that a reparametrisation rewrites."""
    for name in WEIGHTS:
        yield layer.weight_per_head(name)
        bias = None if name == "w_o" else layer.bias_per_head(name)
        if bias is not None:
            yield bias


STD = 0.02  # initializer_range of transformers' Llama, GPT-2, Qwen, Phi and most others


@contextmanager
def untrained(model: Model, seed: int = 0) -> Iterator[Model]:
    """Draw a model's weights anew for as long as the context lasts.

    Matrices become Gaussian with a standard deviation of 0.02, norm weights ones and biases zeros.
    Parameters that are all zero, such as the positions of a HookedTransformer without position
    encoding, stay zero. The trained weights wait in main memory.

    Args:
        model: a HookedTransformer or TransformerBridge; bit-identical afterwards.
        seed: the seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    with used_alone(model), _restored(model.parameters()):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_drawn(name, parameter, generator))
        yield model


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    last = name.rpartition(".")[2].lstrip("_")
    if not parameter.any() or last.startswith("b"):  # bias, b_Q, b, ...
        return torch.zeros_like(parameter)
    if parameter.ndim == 1:
        return torch.ones_like(parameter)
    return STD * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
