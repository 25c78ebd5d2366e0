"""Sizes that no model can have, refused by arithmetic before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

# A configuration lists something for each layer as soon as it is made.
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
MOST_LAYERS = 10_000
# Up to so many numbers beyond those on disk a model is built, and its wrong weights are named.
SPARE_NUMBERS = 100_000_000


def validate_depth(source: str, fields: Mapping[str, Any]) -> None:
    """Check that the numbers of layers in a config.json can be those of a model.

    Raises:
        UserError: naming the field.
    """
    for name, value in _nested(fields):
        if name in _DEPTHS and isinstance(value, int) and not 1 <= value <= MOST_LAYERS:
            raise UserError(
                f"{source} has a config.json with {name} {value}: expected 1 to {MOST_LAYERS}"
            )


def _nested(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the fields of an object and of the objects in it, such as a `text_config`."""
    for name, value in fields.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _nested(value)


def validate_counts(source: str, config: PreTrainedConfig) -> None:
    """Check that a configuration's counts are positive and its heads divide what they share.

    Raises:
        UserError: naming the field.
    """
    counts = {name: getattr(config, name, None) for name in _COUNTS}
    for name, value in counts.items():
        if isinstance(value, int) and value < 1:
            raise UserError(
                f"{source} has a config.json with {name} {value}: expected a positive number"
            )
    heads, key_heads = counts["num_attention_heads"], counts["num_key_value_heads"]
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        raise UserError(
            f"{source} has a config.json with {heads} attention heads, which cannot share "
            f"{key_heads} key-value heads"
        )


def count_numbers(kind: type[PreTrainedModel], config: PreTrainedConfig) -> int:
    """Return how many numbers a configuration's model holds, from its shapes alone."""
    import torch

    with torch.device("meta"):
        model = kind._from_config(deepcopy(config), attn_implementation="eager")
    return sum(each.numel() for each in (*model.parameters(), *model.buffers()))


def validate_fits(source: str, n_numbers: int, weights: Mapping[str, Tensor]) -> None:
    """Check that a model is not far larger than its weights on disk.

    Args:
        source: a Hub id or a local folder.
        n_numbers: how many numbers its configuration asks for.
        weights: its tensors.

    Raises:
        UserError: with both sizes.
    """
    stored = sum(tensor.numel() for tensor in weights.values())
    if n_numbers > 4 * stored + SPARE_NUMBERS:
        raise UserError(
            f"{source} has a config.json of a model of {n_numbers:.3g} numbers, and its weights "
            f"hold {stored:.3g}"
        )
