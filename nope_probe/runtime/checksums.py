"""Checksums of what a run reads and writes: files, JSON values and tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 24  # bytes that are read, or copied from a device, at a time


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def json_checksum(value: object) -> str:
    """Return the SHA-256 of a JSON-ready value, whatever the order of its keys.

    Example:
        >>> json_checksum({"a": 1, "b": [2]}) == json_checksum({"b": [2], "a": 1})
        True
    """
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tensors_checksum(tensors: Mapping[str, Tensor], about: object = None) -> str:
    """Return the SHA-256 of tensors, bit by bit, with their names, shapes and dtypes.

    Args:
        tensors: the tensors, on any device; they are copied from it block by block.
        about: a JSON-ready value that the checksum covers too, such as the tensors' place.
    """
    digest = sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{json.dumps(name)} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for block in _blocks(tensor):
            digest.update(block)
    return digest.hexdigest()


def _blocks(tensor: Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor, at most one block in memory beside the tensor itself."""
    import torch

    flat = tensor.detach().reshape(-1)
    for part in flat.split(max(1, BLOCK // flat.element_size())):
        yield part.cpu().contiguous().view(torch.uint8).numpy()
