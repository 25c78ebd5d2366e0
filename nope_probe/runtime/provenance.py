"""What every run of a study records of its origin."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn

    from nope_probe.data.sequences import Sequences
    from nope_probe.runtime.session import Session, SessionSettings

LIBRARIES = ("nope-probe", "torch", "transformer-lens", "transformers", "numpy", "tokenizers")


def versions() -> dict[str, str]:
    """List the versions of Python and of what the numbers depend on."""
    return {"python": python_version(), **{name: version(name) for name in LIBRARIES}}


def provenance(session: Session[SessionSettings]) -> dict[str, Any]:
    """Return what was run, on which model, with which versions, where and for how long."""
    loaded = session.loaded
    return {
        "command": command_line(),
        "settings": session.recorded,
        "model": {**loaded.info.to_dict(), "weights": fingerprint(loaded.model)},
        "versions": versions(),
        "device": devices_of(loaded.model),
        "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - session.started, 3),
    }


def input_record(inputs: Sequences, skip_keys: int) -> dict[str, Any]:
    """Return what a model was run on.

    Args:
        inputs: token windows or vectors.
        skip_keys: how many first keys the patterns leave out.
    """
    return {
        "data": {"name": inputs.name, "bos": inputs.bos, "sha256": inputs.sha256},
        "skip_keys": skip_keys,
    }


def command_line() -> str:
    """Give the command line of this process, to be run again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", module.name] if module else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def fingerprint(model: nn.Module) -> str:
    """Give what tells a model's weights from others: a checksum of each tensor's first values."""
    digest = sha256()
    for name, parameter in model.named_parameters():
        first = parameter.detach().reshape(-1)[:64].float().cpu()
        digest.update(name.encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


def kept_inputs(inputs: Sequences) -> dict[str, np.ndarray]:
    """Give the array that lets a run be repeated without its data: `tokens`, or `vectors`."""
    kind = "vectors" if inputs.inputs.is_floating_point() else "tokens"
    return {kind: inputs.inputs.numpy()}


def devices_of(model: nn.Module) -> str:
    """Name the devices that a model's weights are on, for the manifest.

    Example:
        >>> import torch
        >>> devices_of(torch.nn.Linear(2, 3))
        'cpu'
    """
    return ", ".join(sorted({str(parameter.device) for parameter in model.parameters()}))
