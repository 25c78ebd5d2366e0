"""Tensors in safetensors files: whole with a checksum, read by parts, or written by blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nope_probe.errors import StorageError
from nope_probe.maps.stored_maps import Index
from nope_probe.runtime.folder import atomic_write, reason
from nope_probe.runtime.identity import tensors_checksum

_CHECKSUM = "checksum"
ITEM = 4  # bytes of a float32
Write = Callable[[str, Sequence[int], np.ndarray], None]


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
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        notes = dict(file.metadata() or {})
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
        with _opened(self.path) as file:
            if index is ...:
                return file.get_tensor(self.name).clone()
            return file.get_slice(self.name)[index].clone()


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file without reading or checking them.

    Raises:
        StorageError: if the file is broken.
    """
    with _opened(path) as file:
        return {
            name: StoredTensor(path=path, name=name, shape=file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118
        }


def read_notes(path: Path) -> dict[str, str]:
    """Read the notes of a file without its tensors, and without checking them: for display alone.

    Raises:
        StorageError: if the file is broken.
    """
    with _opened(path) as file:
        notes = file.metadata() or {}
    return {name: note for name, note in notes.items() if name != _CHECKSUM}


@contextmanager
def tensor_writer(path: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[Write]:
    """Yield a function that writes blocks into a safetensors file of float32 tensors.

    None of the tensors is in memory at once, as safetensors' own functions need them. The function
    takes a tensor's name, the index of the block's first cell (indices that are left out are 0) and
    a block whose cells follow each other in the tensor. What is not written is 0. Where writing
    fails, the file is removed: a full disk gets its room back.

    Args:
        path: the file.
        shapes: the shape of each tensor by its name.

    Raises:
        StorageError: if the file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.numpy import load_file
        >>> with TemporaryDirectory() as folder:
        ...     with tensor_writer(Path(folder, "maps.safetensors"), {"score": (2, 3)}) as write:
        ...         write("score", (1, 1), np.ones(2, np.float32))
        ...     load_file(Path(folder, "maps.safetensors"))["score"].tolist()
        [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    """
    places, end = {}, 0
    for name in sorted(shapes):
        places[name] = [end, end + ITEM * prod(shapes[name])]
        end = places[name][1]
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": place}
            for name, place in places.items()
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % 8)

    def write(name: str, where: Sequence[int], block: Float32[np.ndarray, "*block"]) -> None:
        shape = shapes[name]
        first = sum(at * prod(shape[axis + 1 :]) for axis, at in enumerate(where))
        file.seek(8 + len(header) + places[name][0] + ITEM * first)
        file.write(np.ascontiguousarray(block, "<f4").data)

    try:
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + end)
            yield write
    except BaseException as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(f"cannot write {path}: {reason(error)}") from error
        raise


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _broken(path, str(error)) from error


def _checksum(
    path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str], owner: str
) -> str:
    return tensors_checksum(tensors, [owner, path.name, dict(notes)])


def _broken(path: Path, reason: str) -> StorageError:
    return StorageError(f"{path} is broken ({reason}); remove it and run again")
