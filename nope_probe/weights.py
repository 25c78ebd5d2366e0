"""Weights: only the tensors of the first blocks, from only the safetensors files that hold them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def read_weights(
    source: str, *, n_layers: int | None = None, revision: str | None = None
) -> dict[str, Tensor]:
    """Read a model's tensors, without the blocks from n_layers on.

    Of a sharded checkpoint only the files that hold these tensors are opened, and from the Hub only
    these are downloaded.

    Args:
        source: a Hub id or a local folder.
        n_layers: how many first blocks; all by default.
        revision: a Hub revision.

    Raises:
        UserError: for pickled weights, a missing or broken file (it says which).
    """
    weights: dict[str, Tensor] = {}
    index = _find(source, INDEX, revision)
    if index is not None:
        for name, keys in shards_of(index, n_layers).items():
            shard = _find(source, name, revision)
            if shard is None:
                raise UserError(f"{source} lacks {name}, which its {INDEX} names")
            weights |= _read(shard, keys)
        return weights
    single = _find(source, SINGLE, revision)
    if single is None:
        raise UserError(f"{source} has no safetensors weights; pickled ones are refused")
    return _read(single, None, n_layers)


def shards_of(index: Path, n_layers: int | None) -> dict[str, list[str]]:
    """Give for each file that is needed the tensors to read from it.

    Raises:
        UserError: for an index that is none, or that points out of its folder.
    """
    try:
        weight_map = json.loads(index.read_text())["weight_map"].items()
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{index} is no index of safetensors files") from error
    files: dict[str, list[str]] = {}
    for key, file in weight_map:
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise UserError(f"{index} names {file!r}, which is no safetensors file beside it")
        if is_wanted(key, n_layers):
            files.setdefault(file, []).append(key)
    return files


def is_wanted(key: str, n_layers: int | None) -> bool:
    """Tell whether a tensor belongs to no block, or to one of the first.

    Example:
        >>> is_wanted("model.layers.2.mlp.up_proj.weight", 2), is_wanted("model.norm.weight", 2)
        (False, True)
    """
    block = _BLOCK.search(key)
    return n_layers is None or block is None or int(block[1]) < n_layers


def _find(source: str, name: str, revision: str | None) -> Path | None:
    """Find a file in a folder, or in the cache after downloading it from the Hub."""
    if Path(source).is_dir():
        return Path(source, name) if Path(source, name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except LocalEntryNotFoundError:
        if name == INDEX:  # offline, a model in one file has none in the cache
            return None
        raise
    except EntryNotFoundError:
        return None


def _read(
    file: Path, keys: list[str] | None = None, n_layers: int | None = None
) -> dict[str, Tensor]:
    """Read some tensors of a file, by default those that belong to the first blocks."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            wanted = [k for k in opened.keys() if is_wanted(k, n_layers)] if keys is None else keys  # noqa: SIM118
            return {key: opened.get_tensor(key) for key in wanted}
    except SafetensorError as error:
        raise UserError(f"{file} is no whole safetensors file: {error}") from error
