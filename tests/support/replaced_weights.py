"""Each replacement as weights and biases of the ungrouped model, worked out from plain tensors."""

from typing import Any

import torch
from einops import rearrange
from support.edited_model import (
    Replaced,
    output_means,
    output_sizes,
    projections,
    scaled_identities,
    ungrouped,
)
from torch import Tensor
from transformers import PreTrainedModel

from nope_probe.components import REPLACEMENTS
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.replacements import random_rows

__all__ = ["REPLACEMENTS", "random_matrix", "replaced_weights"]


def replaced_weights(
    kind: str, model: Any, hf: PreTrainedModel, tokens: Tensor, seed: int = 0
) -> Replaced:
    """Return what each projection is replaced by, at the gain `output`.

    The random matrices are those that were drawn for the model: what they have to be is in
    tests/hooks/removing/test_replacements.py.
    """
    copied = ungrouped(hf)
    if kind == "identity":
        return scaled_identities(copied, output_sizes(hf, tokens))
    means = output_means(hf, tokens)
    shapes = {
        (name, layer): weight.shape
        for layer in range(len(layers_of(model)))
        for name, (weight, _) in projections(copied, layer).items()
    }
    if kind == "mean":
        return {key: (torch.zeros(shape), means[key]) for key, shape in shapes.items()}
    if kind == "zero":
        return {key: (torch.zeros(s), torch.zeros(s[0])) for key, s in shapes.items()}
    drawn = {(name, layer): random_matrix(model, name, layer, seed) for name, layer in shapes}
    sizes = output_sizes(hf, tokens, lambda name, layer: drawn[name, layer])
    return {key: (sizes[key] * r, torch.zeros(len(r))) for key, r in drawn.items()}


def random_matrix(model: Any, name: Any, layer: int, seed: int = 0) -> Tensor:
    """Return R as [out, in]."""
    rows = rearrange(random_rows(layers_of(model)[layer], name, seed), "n h m -> (n h) m")
    return rows.T if name == "w_o" else rows
