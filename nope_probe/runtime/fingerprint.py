"""The fingerprint of a model in memory: a checksum of its weights and of its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nope_probe.hooks.model import hugging_face_config
from nope_probe.runtime.checksums import json_checksum, tensors_checksum

if TYPE_CHECKING:
    from torch import Tensor, nn

# Where a model came from, where it is, and who wrote it do not change its numbers.
_UNUSED = (
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "name_or_path",
    "model_name",
    "tokenizer_name",
    "device",
    "n_devices",
)
_THREADS = 8  # SHA-256 releases the interpreter's lock


def fingerprint(model: nn.Module) -> str:
    """Return a checksum of every weight and of the configuration, which identifies a model.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 3)
        >>> before = fingerprint(layer)
        >>> layer.weight.data[2, 1] += 1
        >>> before == fingerprint(layer)
        False
    """
    weights = dict(_weights(model))
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        checksums = pool.map(lambda item: tensors_checksum(dict([item])), weights.items())
        return json_checksum([configuration(model), *checksums])[:16]


def configuration(model: nn.Module) -> dict[str, Any]:
    """Return the settings that a model's numbers depend on beside its weights.

    They are those of the Hugging Face model in a bridge, else of TransformerLens; none for a model
    that has neither.
    """
    found = hugging_face_config(model)
    if found is None:
        config = getattr(model, "cfg", None)
        found = config.to_dict() if config is not None else {}
    found = json.loads(json.dumps(found, sort_keys=True, default=_plain))
    return {name: value for name, value in found.items() if name not in _UNUSED}


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the buffers that are stored with them (quantised weights)."""
    yield from model.named_parameters()
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}", buffer


def _plain(value: Any) -> object:
    """Return a configuration's value as JSON: numbers of NumPy, dtypes and functions by name."""
    if hasattr(value, "item"):
        return value.item()
    return getattr(value, "__name__", None) or str(type(value) if " at 0x" in str(value) else value)
