"""What a run is made of, as one manifest of hashes: settings, versions, weights, model and data.

An unfinished run is resumed, a finished one is shown again or repeated, only where the hashes are
the same. Files are read without torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError
from nope_probe.files import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

Record = dict[str, dict[str, Any]]  # the hash of each file of a source, by the file's name
BLOCK = 1 << 24  # bytes that are read, or copied from a device, at a time
# Of a source, this many bytes are read; files beyond are known by size and time of change.
LARGE = 1 << 30
_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_UNREAD = ("generation_config.json", "run.json")
# Where a model came from, where it is, and who wrote it do not change its numbers.
_UNUSED_IN_FILE = ("_name_or_path", "transformers_version")
_UNUSED = (
    *_UNUSED_IN_FILE,
    "_commit_hash",
    "name_or_path",
    "model_name",
    "tokenizer_name",
    "device",
    "n_devices",
)
_THREADS = 8  # SHA-256 releases the interpreter's lock


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
        checksums = pool.map(lambda item: tensors_checksum(dict([item])), weights.items())
        return json_checksum([configuration(model), *checksums])[:16]


def configuration(model: nn.Module) -> dict[str, Any]:
    """Return the settings that a model's numbers depend on beside its weights.

    They are those of the Hugging Face model in a bridge, else of TransformerLens; none for a model
    that has neither.
    """
    from nope_probe.hooks.layers.model import hugging_face_config

    values = hugging_face_config(model)
    if values is None:
        config = getattr(model, "cfg", None)
        values = config.to_dict() if config is not None else {}
    values = json.loads(json.dumps(values, sort_keys=True, default=_plain))
    return {name: value for name, value in values.items() if name not in _UNUSED}


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the buffers that are stored with them (quantised weights)."""
    yield from model.named_parameters()
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}", buffer


def _plain(value: Any) -> object:
    """Return a configuration's value as JSON: numbers of NumPy, dtypes and functions by name."""
    if hasattr(value, "item"):
        return value.item()
    return getattr(value, "__name__", None) or str(type(value) if " at 0x" in str(value) else value)


def record_sources(sources: Mapping[str, Path | None]) -> dict[str, Record | None]:
    """Return the hashes of the files of each source; None for a source that has none here.

    Raises:
        UserError: for a file that cannot be read.
    """
    return {name: None if path is None else _record(path) for name, path in sources.items()}


def _record(path: Path) -> Record:
    """Return the hashes of a source's files, the smallest first, up to a gigabyte in all."""
    record, total = Record(), 0
    try:
        files = _source_files(path)
        stats = {name: file.stat() for name, file in files.items()}
        for name, stat in sorted(stats.items(), key=lambda item: item[1].st_size):
            total += stat.st_size
            if total > LARGE:
                record[name] = {"size": stat.st_size, "modified": stat.st_mtime_ns}
            else:
                record[name] = {"sha256": _source_checksum(files[name])}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return record


def _source_files(path: Path) -> dict[str, Path]:
    """Return the files at a path by name: the file itself, those of a model, or all in a folder."""
    if path.is_file():
        return {path.name: path}
    if (path / "config.json").is_file():
        files = (file for pattern in _MODEL_FILES for file in path.glob(pattern))
        files = (file for file in files if file.name not in _UNREAD)
    else:
        files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file for file in sorted(files)}


def _source_checksum(path: Path) -> str:
    """Return the checksum of a file; of a configuration, without what changes no number."""
    if path.name == "config.json":
        try:
            config = read_json(path)
            return json_checksum({k: v for k, v in config.items() if k not in _UNUSED_IN_FILE})
        except (ValueError, AttributeError):
            pass  # whoever loads the model says what is wrong with it
    return file_checksum(path)


def validate_unchanged(
    run: Path,
    recorded: Mapping[str, Record | None] | None,
    sources: Mapping[str, Path | None],
    remedy: str = "choose another --out",
) -> list[str]:
    """Check that a finished run's sources are what they were, and return those not compared.

    Args:
        run: the run's folder or file.
        recorded: what its manifest holds; None if it was written before there was such a record.
        sources: where the sources are now.
        remedy: what to do about a source that changed.

    Raises:
        UserError: naming a file that differs.
    """
    unknown = []
    for name, now in record_sources(sources).items():
        before = (recorded or {}).get(name)
        if now is None or before is None:
            unknown.append(name)
            continue
        changed = [file for file in {*before, *now} if before.get(file) != now.get(file)]
        if changed:
            raise UserError(
                f"the {name} has changed since the run in {run}: {sources[name]} "
                f"({min(changed)}); {remedy}"
            )
    return unknown


def validate_repeatable(
    run: Path, recorded: Mapping[str, Record | None] | None, sources: Mapping[str, Path | None]
) -> None:
    """Check that the files which a run was made from are there, and have not changed.

    Raises:
        UserError: naming the model or the data.
    """
    for name in validate_unchanged(run, recorded, sources, "it cannot be repeated"):
        if (recorded or {}).get(name) is not None:
            raise UserError(f"the {name} that {run} was made from is not there any more")
