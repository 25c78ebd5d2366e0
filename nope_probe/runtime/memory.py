"""Memory that runs out in the middle of a run, on a GPU or a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nope_probe.errors import UserError


@contextmanager
def out_of_memory_is_a_user_error() -> Iterator[None]:
    """Turn an out-of-memory error that smaller batches did not cure into one line."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # On a CPU, torch raises a plain RuntimeError.
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        raise UserError(
            "a single sequence, or the model, does not fit into the memory of the device; lower "
            "--seq-len or --layers, or take --device-map auto"
        ) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
