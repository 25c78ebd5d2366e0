"""What a manifest records of a run: command line, model, versions, device, inputs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int
    from torch import Tensor, nn

    from nope_probe.data.sequences import Sequences
    from nope_probe.models.load import LoadedModel

LIBRARIES = ("nope-probe", "torch", "transformer-lens", "transformers", "numpy", "tokenizers")


def provenance(
    loaded: LoadedModel, weights: str, settings: Mapping[str, Any], started: float
) -> dict[str, Any]:
    """Return what was run, on which model, with which versions, where and for how long.

    Args:
        loaded: the model.
        weights: its fingerprint.
        settings: the recorded settings of the run.
        started: when the run started, in seconds of the monotonic clock.
    """
    return {
        "command": command_line(),
        "settings": dict(settings),
        "model": {**loaded.info.to_dict(), "weights": weights},
        "versions": versions(),
        "threads": threads(),
        "device": devices_of(loaded.model),
        "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 3),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that the numbers depend on."""
    return {"python": python_version(), **{name: version(name) for name in LIBRARIES}}


def threads() -> int:
    """Return how many threads torch computes with: sums are in an order that depends on it."""
    import torch

    return torch.get_num_threads()


def command_line() -> str:
    """Return the command line of this process, as it can be typed again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = (
        ["python", "-m", module.name.removesuffix(".__main__")]
        if module
        else [Path(sys.argv[0]).name]
    )
    return shlex.join([*program, *sys.argv[1:]])


def devices_of(model: nn.Module) -> str:
    """Return the devices that hold a model's weights, joined by commas.

    Example:
        >>> import torch
        >>> devices_of(torch.nn.Linear(2, 3))
        'cpu'
    """
    return ", ".join(sorted({str(parameter.device) for parameter in model.parameters()}))


def input_record(inputs: Sequences, skip_keys: int, counts: Int[Tensor, " fold"]) -> dict[str, Any]:
    """Return which sequences a model was run on, and how many first keys patterns leave out.

    Args:
        inputs: the sequences.
        skip_keys: how many first keys patterns leave out.
        counts: sequences per fold.
    """
    return {
        "data": {"name": inputs.name, "bos": inputs.bos, "sha256": inputs.sha256},
        "documents": None if inputs.documents is None else inputs.n_documents,
        "fold_sizes": counts.tolist(),
        "skip_keys": skip_keys,
    }


def input_arrays(inputs: Sequences) -> dict[str, np.ndarray]:
    """Return the sequences as `tokens` or `vectors`: a run can be repeated without its data.

    With them, where they are cut out of documents, goes the number of each one's `documents`.
    """
    name = "vectors" if inputs.inputs.is_floating_point() else "tokens"
    arrays = {name: inputs.inputs.numpy()}
    if inputs.documents is not None:
        arrays["documents"] = inputs.documents.numpy()
    return arrays
