"""Take the learned weights out of a model's norms, without changing its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from nope_probe.hooks.base_layer import Layer, NormName
from nope_probe.hooks.forward import hooks_attached
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.placed import PlacedHook
from nope_probe.hooks.protocols import Model

NORMS: tuple[NormName, ...] = get_args(NormName)


@contextmanager
def plain_norms(model: Model) -> Iterator[Model]:
    """Run a model as if the norms of its blocks only normalised: weights 1, biases 0.

    The norm before attention and the one before the MLP lose their weights in every block; the last
    norm and q/k-norms keep theirs. `ablated` can be used inside it.

    Raises:
        ValueError: for a HookedTransformer whose norm has a weight of exactly 0, which cannot be
            divided out.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.norm_weights import plain_norms
        >>> model = load("nope-tiny").model
        >>> with plain_norms(model):
        ...     logits = model(torch.tensor([[0, 5, 9]]))
    """
    hooks = [(each.point, each.hook) for layer in layers_of(model) for each in norm_hooks(layer)]
    with hooks_attached(hooks):
        yield model


def norm_hooks(layer: Layer) -> Iterator[PlacedHook]:
    """Return the hooks that take the learned weights out of one block's norms."""
    for norm in NORMS:
        if layer.has(f"{norm}.hook_normalized"):
            yield from layer.hooks_without_norm_weight(norm)
