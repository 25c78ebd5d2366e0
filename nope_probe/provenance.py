"""What every run of a study records of its origin."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from nope_probe.data import Windows
from nope_probe.models import Loaded
from nope_probe.placement import devices_of
from nope_probe.results import versions


def provenance(
    *,
    settings: Mapping[str, Any],
    loaded: Loaded,
    inputs: Windows,
    skip_keys: int,
    started: float,
) -> dict[str, Any]:
    """Say what was run, on which model and data, with which versions, where and for how long.

    Args:
        settings: what was asked.
        loaded: the model.
        inputs: what it was run on.
        skip_keys: how many first keys the patterns leave out.
        started: when the run began, in seconds since the epoch.
    """
    parameter = next(loaded.model.parameters())
    return {
        "command": command_line(),
        "settings": dict(settings),
        "model": {**loaded.card.to_dict(), "weights": fingerprint(loaded.model)},
        "data": {"name": inputs.name, "bos": inputs.bos, "sha256": inputs.sha256},
        "skip_keys": skip_keys,
        "versions": versions(),
        "device": devices_of(loaded.model),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 3),
    }


def command_line() -> str:
    """Give the command line of this process, to be run again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", module.name] if module else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def fingerprint(model: Any) -> str:
    """Give what tells a model's weights from others: a checksum of each tensor's first values."""
    digest = sha256()
    for name, parameter in model.named_parameters():
        first = parameter.detach().reshape(-1)[:64].float().cpu()
        digest.update(name.encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]


def kept_inputs(inputs: Windows) -> dict[str, np.ndarray]:
    """Give the array that lets a run be repeated without its data: `tokens`, or `vectors`."""
    kind = "vectors" if inputs.inputs.is_floating_point() else "tokens"
    return {kind: inputs.inputs.numpy()}
