"""The identity of a run, in hashes, and how it was made, as a manifest records them.

A run is resumed or shown again only where settings, versions, weights, model files and
data are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import version
from platform import python_version
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.data.sequences import Sequences
from nope_probe.files import json_checksum
from nope_probe.hooks.layers.attention import score_tolerance
from nope_probe.hooks.layers.model import (
    Inputs,
    hugging_face_config,
    logits_of,
    modules_of,
    run_blocks,
)
from nope_probe.hooks.layers.threads import used_alone
from nope_probe.hooks.removing.block_ablation import ABLATED, foreign_hooks
from nope_probe.models.info import LoadedModel
from nope_probe.runtime.finished import UNUSED_IN_FILE

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
    """Return a hash of every weight and of the configuration, which identifies a model in memory.

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
        checksums = pool.map(tensor_checksum, weights, weights.values())
        return json_checksum([configuration(model), *checksums])[:16]


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the buffers that are stored with them (quantised weights)."""
    yield from model.named_parameters()
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}", buffer


def tensor_checksum(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bits, with its name, shape and dtype."""
    digest = sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


State = dict[str, Any]  # what a model's weights and configuration do not tell, by name
LONGEST = 1024  # tokens of the sequence that shows a model's state
_EPSILONS = ("eps", "epsilon", "variance_epsilon")  # of norms
_N_SUMS = 16


def model_state(loaded: LoadedModel, inputs: Inputs | None, seq_len: int) -> State:
    """Return what decides the numbers of a model in memory beside weights and configuration.

    `outputs` are sums of its outputs on one sequence, by which any change shows; they agree within
    `tolerance` on any machine. `hooks` are the modules with hooks, `ablation` is the one in effect.

    Args:
        loaded: the model, in the state in which it is run.
        inputs: the sequences of the run, of which the first is run; random ones by default.
        seq_len: tokens of a random sequence.
    """
    model, info, modules = loaded.model, loaded.info, modules_of(loaded.model).values()
    if inputs is None:
        n, generator = min(seq_len, info.n_ctx), torch.Generator().manual_seed(0)
        if info.parameter_free:
            inputs = torch.randn(1, n, info.d_model, generator=generator)
        else:
            inputs = torch.randint(info.d_vocab, (1, n), generator=generator)
    run = run_blocks if inputs.is_floating_point() else logits_of
    with used_alone(model), torch.inference_mode():
        outputs = run(model, inputs[:1, :LONGEST])[0].float().cpu()
        active, hooks = ABLATED.get(model), foreign_hooks(model)
    epsilons = [vars(m).get(e) for m in modules for e in _EPSILONS]
    return {
        "ablation": None if active is None else str(active.ablation),
        "hooks": hooks,
        "norm epsilons": sorted({value for value in epsilons if isinstance(value, float)}),
        "outputs": _signed_sums(outputs),
        "tolerance": score_tolerance(next(model.parameters()).dtype),
    }


def _signed_sums(outputs: Float[Tensor, "pos output"]) -> list[float]:
    """Return sums of outputs, each with random signs of positions and of a position's outputs."""
    generator = torch.Generator().manual_seed(0)
    of_rows, of_columns = (
        1.0 - 2 * torch.randint(2, (_N_SUMS, n), generator=generator) for n in outputs.shape
    )
    sums = (of_rows @ outputs * of_columns).sum(1) / outputs.numel() ** 0.5
    return [float(f"{value:.7g}") for value in sums.tolist()]


def changes_of_state(before: State, now: State) -> list[str]:
    """Return what differs between two states, by name; outputs agree within the tolerance."""
    rest = [name for name in now if name != "outputs" and before.get(name) != now[name]]
    sums, expected = now["outputs"], before.get("outputs", [])
    bound = now["tolerance"] * max(map(abs, expected), default=0.0)
    near = len(sums) == len(expected) and all(
        abs(value - other) <= bound for value, other in zip(sums, expected, strict=True)
    )
    return rest if near else [*rest, "outputs"]


def changes_of_model(
    manifest: Mapping[str, Any], loaded: LoadedModel, inputs: Inputs | None, seq_len: int
) -> list[str]:
    """Return what differs between the model of a run and another, by name.

    Args:
        manifest: the run's.
        loaded: the other model.
        inputs: the sequences that a call from Python gave the run, if it gave any.
        seq_len: tokens of the run's sequences.
    """
    if fingerprint(loaded.model) != manifest["model"]["weights"]:
        return ["weights or configuration"]
    if "weights" not in manifest["settings"].get("given", {}):
        return []  # a model by name is loaded as the run loaded it
    return changes_of_state(manifest.get("state", {}), model_state(loaded, inputs, seq_len))


def changes_of_run(before: Any, now: Mapping[str, Any]) -> list[str]:
    """Return what differs between a run, as its JSON file describes it, and another, by name."""

    def differs(name: str, value: Any) -> bool:
        if name == "state":
            return bool(changes_of_state(before.get(name, {}), value))
        return before.get(name) != value

    return [name for name, value in now.items() if differs(name, value)]


def configuration(model: nn.Module) -> dict[str, Any]:
    """Return the settings that a model's numbers depend on beside its weights.

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


def input_record(inputs: Sequences, skip_keys: int, counts: Int[Tensor, " fold"]) -> dict[str, Any]:
    """Return which sequences a model was run on, and how many keys count as first.

    Args:
        inputs: the sequences.
        skip_keys: how many keys count as first in patterns.
        counts: sequences per fold.
    """
    about: dict[str, Any] = {"notes": [*inputs.notes]} if inputs.notes else {}
    about |= {"bos_token": inputs.bos_token} if inputs.bos_token else {}
    return {
        "data": {"name": inputs.name, "bos": inputs.bos, "sha256": inputs.sha256, **about},
        "documents": None if inputs.documents is None else inputs.n_documents,
        "distinct_sequences": inputs.n_distinct,
        "fold_sizes": counts.tolist(),
        "skip_keys": skip_keys,
    }


def input_arrays(inputs: Sequences) -> dict[str, np.ndarray]:
    """Return the sequences as `tokens` or `vectors`: a run can be repeated without its data.

    Sequences that are cut out of documents come with their numbers, `documents`.
    """
    name = "vectors" if inputs.inputs.is_floating_point() else "tokens"
    arrays = {name: inputs.inputs.numpy()}
    if inputs.documents is not None:
        arrays["documents"] = inputs.documents.numpy()
    return arrays
