"""Tensors and notes in safetensors files that are complete or absent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nope_probe.runtime.folder import StorageError, atomic_write


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write tensors and notes to a file; a process killed on the way leaves the file as it was.

    Raises:
        StorageError: if the file cannot be written.
    """
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    try:
        with atomic_write(path) as partial:
            save_file(contiguous, partial, metadata=dict(notes))
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, memory-mapped.

    Raises:
        StorageError: if the file is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _broken(path, error) from error


def read_notes(path: Path) -> dict[str, str]:
    """Read the notes of a file.

    Raises:
        StorageError: if the file is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: SafetensorError) -> StorageError:
    return StorageError(f"{path} is broken ({error}); remove it and run again")
