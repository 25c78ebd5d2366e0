"""The identity of a run, in hashes, and how it was made, as a manifest records them.

A run is resumed or shown again only where settings, versions, weights, model files and
data are the same.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from platform import python_version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nope_probe.data.sequences import Sequences
from nope_probe.files import JsonObject, json_checksum
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import hugging_face_config
from nope_probe.hooks.removing.block_ablation import ABLATED, foreign_hooks
from nope_probe.models.info import LoadedModel
from nope_probe.run.finished_run import UNUSED_IN_FILE
from nope_probe.run.manifest import Manifest

LIBRARIES = ("nope-probe", "torch", "transformer-lens", "transformers", "numpy", "tokenizers")
# Where a model came from, where it is, and who wrote it do not change its numbers.
_UNUSED = (
    *UNUSED_IN_FILE,
    "_commit_hash",
    "name_or_path",
    "model_name",
    "tokenizer_name",
    "device",
    "n_devices",
)
_THREADS = 8  # SHA-256 releases the interpreter's lock


def fingerprint(model: nn.Module) -> str:
    """Return a hash of every weight, buffer and setting, which identifies a model in memory.

    Buffers that are not stored with the weights count too, such as RoPE's frequencies.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 3)
        >>> before = fingerprint(layer)
        >>> layer.weight.data[2, 1] += 1
        >>> before == fingerprint(layer)
        False
    """
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        checksums = pool.map(tensor_checksum, tensors, tensors.values())
        return json_checksum([numerical_settings(model), *checksums])[:16]


def tensor_checksum(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bits, with its name, shape and dtype."""
    digest = sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def interventions(model: HookedModel) -> dict[str, str | list[str] | None]:
    """Return what changes a model in memory besides its weights: the ablation, and its hooks.

    `hooks` are the modules on which the user has hooks, `ablation` is the one in effect.
    """
    active = ABLATED.get(model)
    ablation = None if active is None else str(active.ablation)
    return {"ablation": ablation, "hooks": foreign_hooks(model)}


def changes_of_model(manifest: Manifest, loaded: LoadedModel) -> list[str]:
    """Return what differs between the model of a run and another, by name.

    Args:
        manifest: the run's.
        loaded: the other model.
    """
    given: JsonObject = {"hooks": [], "ablation": None} | manifest.given
    changes = [name for name, now in interventions(loaded.model).items() if now != given[name]]
    same = manifest.model is not None and fingerprint(loaded.model) == manifest.model.weights
    return [*([] if same else ["weights or configuration"]), *changes]


def numerical_settings(model: nn.Module) -> JsonObject:
    """Return the settings that a model's numbers depend on besides its weights.

    A bridge has those of its Hugging Face model, other models those of TransformerLens; a model
    without either has none.
    """
    values, config = hugging_face_config(model), getattr(model, "cfg", None)
    if values is None:
        values = {} if config is None else config.to_dict()
    values = json.loads(json.dumps(values, sort_keys=True, default=_plain))
    return {name: value for name, value in values.items() if name not in _UNUSED}


def _plain(value: Any) -> object:
    """Return a configuration's value as JSON: numbers of NumPy, dtypes and functions by name."""
    if hasattr(value, "item"):
        return value.item()
    return getattr(value, "__name__", None) or str(type(value) if " at 0x" in str(value) else value)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that the numbers depend on."""
    return {"python": python_version(), **{name: version(name) for name in LIBRARIES}}


def threads() -> int:
    """Return the number of torch's threads, on which the order of sums depends."""
    return torch.get_num_threads()


def input_arrays(inputs: Sequences) -> dict[str, np.ndarray]:
    """Return the sequences as `tokens` or `vectors`: a run can be repeated without its data.

    Sequences that are cut out of documents come with their numbers, `documents`.
    """
    name = "vectors" if inputs.inputs.is_floating_point() else "tokens"
    arrays = {name: inputs.inputs.numpy()}
    if inputs.documents is not None:
        arrays["documents"] = inputs.documents.numpy()
    return arrays
