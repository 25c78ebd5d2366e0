"""Tensors and notes in safetensors files that are complete or absent, each with its checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nope_probe.errors import StorageError
from nope_probe.hooks.layer_folds import Index
from nope_probe.runtime.checksums import tensors_checksum
from nope_probe.runtime.folder import atomic_write, reason

_CHECKSUM = "checksum"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str], *, owner: str
) -> None:
    """Write tensors and notes to a file; a process killed on the way leaves the file as it was.

    Args:
        path: the file; its checksum covers its name, so that two files cannot be swapped.
        tensors: the tensors.
        notes: short texts about them.
        owner: what the file belongs to; nothing else reads it.

    Raises:
        StorageError: if the file cannot be written.
    """
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {**notes, _CHECKSUM: _checksum(path, contiguous, notes, owner)}
    try:
        with atomic_write(path) as partial:
            save_file(contiguous, partial, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {reason(error)}") from error


def read_tensors(path: Path, *, owner: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a file, memory-mapped, and its notes.

    Raises:
        StorageError: if the file is broken, another one, or another owner's.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            notes = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _broken(path, str(error)) from error
    if notes.pop(_CHECKSUM, None) != _checksum(path, tensors, notes, owner):
        raise _broken(path, "it is not what was written there")
    return tensors, notes


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, of which the parts are read that are asked for.

    Attributes:
        path: the file.
        name: the tensor's name there.
        shape: the size of each dimension.
    """

    path: Path
    name: str
    shape: Sequence[int]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Return a part, all of it for `...`; the file is mapped into memory no longer than that.

        Raises:
            StorageError: if the file is broken.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                if index is ...:
                    return file.get_tensor(self.name).clone()
                return file.get_slice(self.name)[index].clone()
        except (OSError, SafetensorError) as error:
            raise _broken(self.path, str(error)) from error


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file without reading or checking them.

    Raises:
        StorageError: if the file is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: StoredTensor(path=path, name=name, shape=file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118
            }
    except (OSError, SafetensorError) as error:
        raise _broken(path, str(error)) from error


def read_notes(path: Path) -> dict[str, str]:
    """Read the notes of a file without its tensors, and without checking them: for display alone.

    Raises:
        StorageError: if the file is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            notes = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _broken(path, str(error)) from error
    notes.pop(_CHECKSUM, None)
    return notes


def _checksum(
    path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str], owner: str
) -> str:
    return tensors_checksum(tensors, [owner, path.name, dict(notes)])


def _broken(path: Path, reason: str) -> StorageError:
    return StorageError(f"{path} is broken ({reason}); remove it and run again")
