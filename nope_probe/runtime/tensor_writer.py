"""Write a safetensors file a block at a time, none of its tensors being in memory at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import Float32

from nope_probe.errors import StorageError
from nope_probe.runtime.folder import reason

ITEM = 4  # bytes of a float32


class TensorWriter:
    """A safetensors file of float32 tensors, whose blocks are written as they are made.

    What is not written is 0. Where writing fails, the file is removed: a full disk gets its room
    back.

    Args:
        path: the file.
        shapes: the shape of each tensor by its name.

    Raises:
        StorageError: if the file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.numpy import load_file
        >>> with TemporaryDirectory() as folder:
        ...     with TensorWriter(Path(folder, "maps.safetensors"), {"score": (2, 3)}) as writer:
        ...         writer.write("score", (1, 1), np.ones(2, np.float32))
        ...     load_file(Path(folder, "maps.safetensors"))["score"].tolist()
        [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    """

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        self.path, self.shapes = path, {name: tuple(shapes[name]) for name in sorted(shapes)}
        self.offsets: dict[str, int] = {}
        header, end = {}, 0
        for name, shape in self.shapes.items():
            self.offsets[name], end = end, end + ITEM * prod(shape)
            places = [self.offsets[name], end]
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": places}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header, self._size = len(text).to_bytes(8, "little") + text, end

    def __enter__(self) -> TensorWriter:
        try:
            self._file = self.path.open("wb")
            self._file.write(self._header)
            self._file.truncate(len(self._header) + self._size)
        except OSError as error:
            self._remove()
            raise self._failed(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as broken:
            self._remove()
            raise self._failed(broken) from broken
        if kind is not None:
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def write(self, name: str, where: Sequence[int], block: Float32[np.ndarray, "*block"]) -> None:
        """Write a block of a tensor whose cells follow each other there.

        Args:
            name: the tensor.
            where: the index of the block's first cell; indices that are left out are 0.
            block: the cells.

        Raises:
            StorageError: if the disk is full.
        """
        shape = self.shapes[name]
        first = sum(at * prod(shape[axis + 1 :]) for axis, at in enumerate(where))
        try:
            self._file.seek(len(self._header) + self.offsets[name] + ITEM * first)
            self._file.write(np.ascontiguousarray(block, "<f4").data)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write {self.path}: {reason(error)}")
