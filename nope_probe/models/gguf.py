"""GGUF files, llama.cpp's format: weights, configuration and tokenizer in one, mostly quantised.

transformers reads a model from such a file and undoes its quantisation. What transformers leaves
out of a file without a word is refused here.
"""

from __future__ import annotations

import atexit
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from huggingface_hub import hf_hub_download
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__,
    integrations,
)
from transformers import modeling_gguf_pytorch_utils as reader
from transformers.utils import quantization_config
from transformers.utils.hub import extract_commit_hash

from nope_probe.errors import UserError
from nope_probe.files import JsonObject, read_json, reading
from nope_probe.models.gguf_keys import complete_fields
from nope_probe.models.info import GGUFInfo
from nope_probe.models.names import file_on_hub

if TYPE_CHECKING:  # an optional package
    from gguf import GGUFReader

MAGIC = b"GGUF"
_BLOCK = re.compile(r"blk\.(\d+)\.")
# Architectures of which transformers reports the tensors that it leaves out.
WITH_REPORT = getattr(getattr(integrations, "gguf", None), "GGUF_CONFIG_ARCHS", ())
# Tensors with RoPE's factors for each pair of a head's coordinates.
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def load_gguf(
    kind: type[PreTrainedModel], source: str, revision: str | None, options: JsonObject
) -> tuple[PreTrainedModel, JsonObject]:
    """Load the weights of a GGUF file, dequantised.

    Args:
        kind: the model's class.
        source: a file on this machine, or `owner/name/FILE.gguf` on the Hub.
        revision: a Hub revision.
        options: further arguments of `from_pretrained`.
    """
    if hasattr(quantization_config, "GgufConfig"):  # where transformers can keep weights packed
        plain = quantization_config.GgufConfig(dequantize=True)
        options = {**options, "quantization_config": plain}
    path = gguf_path(source, revision)
    header, (folder, link) = _header(path), _alone(path)
    with _reading(header, options["config"].num_hidden_layers):
        model, report = kind.from_pretrained(folder, gguf_file=link, **options)
        unused = unused_tensors(header, model)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it holds the path, and the weights are plain now
    report["unexpected_keys"] = {*report["unexpected_keys"], *unused}
    _header_unchanged.cache_clear()  # a parsed vocabulary takes 100 MB, and the model is loaded
    return model, report


def load_gguf_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a GGUF file, without tokens that transformers adds to the file's.

    Return None for a file without tokens.

    The tokenizer is saved in a folder that stays while the process lives, because
    TransformerLens loads it a second time by its folder.
    """
    path = gguf_path(source, revision)
    n_tokens = _read(source, revision).n_tokens
    if not n_tokens:
        return None
    folder, link = _alone(path)
    file = Path(folder, "tokenizer.json")
    if not file.is_file():
        with _reading(_header(path)):
            made = AutoTokenizer.from_pretrained(folder, gguf_file=link)
        made.save_pretrained(folder)
        state = read_json(file)
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < n_tokens]
        file.write_text(json.dumps(state), encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _alone(path: Path) -> tuple[str, str]:
    """Return a folder that holds a link to a GGUF file alone, and the link.

    transformers would read a tokenizer and an adapter next to the file in place of the file's.
    """
    folder = _folder_of(path, path.stat().st_mtime_ns)
    link = Path(folder, path.name)
    if not link.is_symlink():
        link.symlink_to(path.absolute())
    return folder, str(link)


@cache
def _folder_of(path: Path, modified: int) -> str:
    """Return the folder of the tokenizer of a GGUF file that was last changed at some time."""
    folder = TemporaryDirectory(prefix="nope_probe-")
    atexit.register(folder.cleanup)
    return folder.name


def gguf_path(source: str, revision: str | None = None) -> Path:
    """Return the path of a GGUF file, after downloading it if it is on the Hub."""
    if Path(source).is_file():
        return Path(source)
    repository, file = file_on_hub(source)
    return Path(hf_hub_download(repository, file, revision=revision))


def read_gguf_config(source: str, revision: str | None = None) -> PreTrainedConfig:
    """Read a model's configuration from a GGUF file.

    Raises:
        UserError: for a file that is no whole GGUF file, an architecture or a scaled RoPE that
            transformers does not read from GGUF, or without the package gguf.
    """
    config = AutoConfig.for_model(**deepcopy(_read(source, revision).fields))
    config._commit_hash = extract_commit_hash(str(gguf_path(source, revision)), None)
    return config


def describe_gguf(source: str, revision: str | None = None) -> GGUFInfo:
    """Return the hash and the quantisation of a GGUF file."""
    return _read(source, revision).info


def unused_tensors(header: GGUFReader, model: PreTrainedModel) -> set[str]:
    """Return the tensors of a GGUF file that transformers leaves out of a model without a word.

    Args:
        header: the file's.
        model: the model, or its first layers.
    """
    architecture = _architecture_of(header)
    if architecture in WITH_REPORT:
        return set()
    kind = reader.TENSOR_PROCESSORS.get(architecture, reader.TensorProcessor)
    used = reader.get_gguf_hf_weights_map(model, kind(config={}))
    tensors = {t.name for t in header.tensors if _is_wanted(t.name, model.config.num_hidden_layers)}
    return {name for name in tensors if not {name, name.removesuffix(".weight")} & used.keys()}


@dataclass(frozen=True)
class _Contents:
    """The parts of a GGUF file that are kept: what transformers makes of its metadata, and more."""

    fields: JsonObject
    info: GGUFInfo
    n_tokens: int


def _read(source: str, revision: str | None) -> _Contents:
    path = gguf_path(source, revision)
    return _read_unchanged(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)  # a command asks several times
def _read_unchanged(path: Path, modified: int) -> _Contents:
    """Read a GGUF file's metadata.

    Args:
        path: the file.
        modified: when it was last changed.
    """
    from gguf import LlamaFileType

    header = _header(path)
    stated = header.get_field("general.file_type")
    try:
        with _reading(header):
            fields, _ = PreTrainedConfig.get_config_dict(str(path.parent), gguf_file=str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: transformers {__version__} does not read the architecture "
            f"{_architecture_of(header)} from GGUF, take the model's folder or Hub id with "
            "safetensors"
        ) from error
    validate_rope(path, header)
    if _architecture_of(header) == "llama":  # a file named mistral too
        fields["model_type"] = "llama"
    fields.setdefault("pad_token_id", None)  # a class of transformers may have another model's
    fields = complete_fields(str(path), _keys_of(header), fields)
    with path.open("rb") as file:
        sha256 = file_digest(file, "sha256").hexdigest()
    info = GGUFInfo(
        file=path.name,
        sha256=sha256,
        file_type=None if stated is None else LlamaFileType(stated.contents()).name,
        tensor_types=dict(Counter(tensor.tensor_type.name for tensor in header.tensors)),
    )
    tokens = header.get_field("tokenizer.ggml.tokens")
    return _Contents(fields, info, 0 if tokens is None else len(tokens.data))


def validate_rope(path: Path, header: GGUFReader) -> None:
    """Check that a GGUF file scales RoPE by no table, which transformers does not read.

    Raises:
        UserError: naming the table.
    """
    tables = [tensor.name for tensor in header.tensors if tensor.name in _ROPE_TABLES]
    if tables:
        raise UserError(
            f"{path} scales RoPE ({tables[0]}), which transformers does not read from GGUF: take "
            "the model's folder or Hub id with safetensors"
        )


def _keys_of(header: GGUFReader) -> JsonObject:
    """Return a file's keys on its model, without the name of the architecture."""
    start = f"{_architecture_of(header)}."
    fields = header.fields.items()
    return {key[len(start) :]: field.contents() for key, field in fields if key.startswith(start)}


def _architecture_of(header: GGUFReader) -> str | None:
    field = header.get_field("general.architecture")
    return None if field is None else field.contents()


def _header(path: Path) -> GGUFReader:
    """Return a GGUF file's metadata and the list of its tensors.

    Raises:
        UserError: without the package gguf, or for a file that is none or is not whole.
    """
    return _header_unchanged(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)  # parsing a vocabulary takes seconds, and a model is loaded in several steps
def _header_unchanged(path: Path, modified: int) -> GGUFReader:
    if find_spec("gguf") is None:
        raise UserError(f"{path} needs the package gguf: pip install gguf")
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UserError(
                f"{path} is no GGUF file, as its first bytes are not {MAGIC.decode()}: download it "
                "again, or name another model"
            )

    class Plain(GGUFReader):  # numpy's class of mapped files takes most of the time of a vocabulary
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    with reading(f"{path} is broken or not whole, download it again"):
        return Plain(path)


@contextmanager
def _reading(header: GGUFReader, n_layers: int | None = None) -> Iterator[None]:
    """Hand transformers what it would make again in every step of loading, and hide its bar.

    Args:
        header: the file's, parsed; transformers also makes a map of names for every module.
        n_layers: how many first layers have tensors that are dequantised; all by default.
    """
    import gguf

    wanted = copy(header)
    wanted.tensors = [tensor for tensor in header.tensors if _is_wanted(tensor.name, n_layers)]
    kind, names, bar = gguf.GGUFReader, gguf.get_tensor_name_map, reader.tqdm
    made = {"GGUFReader": lambda _: wanted, "get_tensor_name_map": cache(names)}
    vars(gguf).update(made)
    reader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        vars(gguf).update(GGUFReader=kind, get_tensor_name_map=names)
        reader.tqdm = bar


def _is_wanted(tensor: str, n_layers: int | None) -> bool:
    """Return whether a tensor belongs to no block or to one of the first n_layers."""
    block = _BLOCK.match(tensor)
    return n_layers is None or block is None or int(block[1]) < n_layers
