"""GGUF files, llama.cpp's format: weights, configuration and tokenizer in one, mostly quantised.

transformers reads a model from such a file and undoes its quantisation. It leaves out some keys
of a file without a word, such as the base of RoPE or a window. Here all keys that decide sizes,
positions and norms are compared with its configuration. A field that differs is set. A key that the
configuration cannot hold is refused by name.
"""

from __future__ import annotations

import atexit
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from math import nextafter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

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
from nope_probe.files import JsonObject, file_checksum, read_json, reading
from nope_probe.models.info import GGUFInfo
from nope_probe.models.names import file_on_hub
from nope_probe.models.weights import is_wanted

if TYPE_CHECKING:  # an optional package
    from gguf import GGUFReader

# Architectures of which transformers reports the tensors that it leaves out.
WITH_REPORT = getattr(getattr(integrations, "gguf", None), "GGUF_CONFIG_ARCHS", ())
# Tensors with RoPE's factors for each pair of a head's coordinates.
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

FileKeys = JsonObject  # without the name of the architecture, such as `rope.freq_base`
Fields = JsonObject

_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
# Fields that may hold a key; of each architecture's configuration, the first that it has. A size
# without a field needs none: the shapes of the tensors show whether the configuration has it.
SIZES: dict[str, tuple[str, ...]] = {
    "attention.key_length": ("global_head_dim", "head_dim"),
    "attention.key_length_swa": ("head_dim",),
    "context_length": ("n_positions", "max_position_embeddings"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "feed_forward_length": ("n_inner", "ffn_hidden_size"),
}
FIELDS: dict[str, tuple[str, ...]] = {
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attention.sliding_window_pattern": ("layer_types",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
# Keys that `rope_parameters` holds.
ROPE = (
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
# Keys that transformers reads, or that the shapes of the tensors show.
_READ = (
    *("attention.head_count", "attention.head_count_kv", "attention.value_length"),
    *("attention.value_length_swa", "rope.dimension_sections", "rope.scaling.finetuned"),
)
_FACTORS = ("embedding_scale", "logit_scale", "residual_scale")
# Values with which a key that no configuration holds changes nothing; by default 0.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (0, 1),
    **dict.fromkeys(_FACTORS, (0, 1)),
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


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
    file = _file_of(source, revision)
    header, (folder, link) = _header(file), _alone(file)
    with _reading(header, options["config"].num_hidden_layers):
        model, report = kind.from_pretrained(folder, gguf_file=link, **options)
        unused = unused_tensors(header, model)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it holds the path, and the weights are plain now
    report["unexpected_keys"] = {*report["unexpected_keys"], *unused}
    _header.cache_clear()  # a parsed vocabulary takes 100 MB, and the model is loaded
    return model, report


def load_gguf_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a GGUF file, without tokens that transformers adds to the file's.

    Return None for a file without tokens.

    The tokenizer is saved in a folder that stays while the process lives, because
    TransformerLens loads it a second time by its folder.
    """
    file = _file_of(source, revision)
    folder, link = _alone(file)
    saved = Path(folder, "tokenizer.json")
    if not saved.is_file():
        header = _header(file)
        tokens = header.get_field("tokenizer.ggml.tokens")
        if tokens is None:
            return None
        with _reading(header):
            made = AutoTokenizer.from_pretrained(folder, gguf_file=link)
        made.save_pretrained(folder)
        state = read_json(saved)
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < len(tokens.data)]
        saved.write_text(json.dumps(state), encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


class _File(NamedTuple):
    """A GGUF file that was last changed at some time: what is read of it is read once."""

    path: Path
    modified: int


def _file_of(source: str, revision: str | None = None) -> _File:
    """Return a GGUF file, after downloading it if it is on the Hub."""
    path = Path(source)
    if not path.is_file():
        repository, file = file_on_hub(source)
        path = Path(hf_hub_download(repository, file, revision=revision))
    return _File(path, path.stat().st_mtime_ns)


@cache
def _alone(file: _File) -> tuple[str, str]:
    """Return a folder that holds a link to a GGUF file alone, and the link.

    transformers would read a tokenizer and an adapter next to the file in place of the file's.
    """
    folder = TemporaryDirectory(prefix="nope_probe-")
    atexit.register(folder.cleanup)
    link = Path(folder.name, file.path.name)
    link.symlink_to(file.path.absolute())
    return folder.name, str(link)


def read_gguf_config(source: str, revision: str | None = None) -> PreTrainedConfig:
    """Read a model's configuration from a GGUF file.

    Raises:
        UserError: for a file that is no whole GGUF file, an architecture or a scaled RoPE that
            transformers does not read from GGUF, or without the package gguf.
    """
    file = _file_of(source, revision)
    fields, _ = _read(file)
    config = AutoConfig.for_model(**deepcopy(fields))
    config._commit_hash = extract_commit_hash(str(file.path), None)
    return config


def describe_gguf(source: str, revision: str | None = None) -> GGUFInfo:
    """Return the hash and the quantisation of a GGUF file."""
    _, info = _read(_file_of(source, revision))
    return info


def unused_tensors(header: GGUFReader, model: PreTrainedModel) -> set[str]:
    """Return the tensors that transformers leaves out of a model (or its first layers) silently."""
    architecture = _architecture_of(header)
    if architecture in WITH_REPORT:
        return set()
    kind = reader.TENSOR_PROCESSORS.get(architecture, reader.TensorProcessor)
    used = reader.get_gguf_hf_weights_map(model, kind(config={}))
    tensors = {t.name for t in header.tensors if is_wanted(t.name, model.config.num_hidden_layers)}
    return {name for name in tensors if not {name, name.removesuffix(".weight")} & used.keys()}


@lru_cache(maxsize=1)  # a command asks several times
def _read(file: _File) -> tuple[Fields, GGUFInfo]:
    """Return the fields of a GGUF file's configuration, and its description."""
    from gguf import LlamaFileType

    header, path = _header(file), file.path
    architecture = _architecture_of(header)
    stated = header.get_field("general.file_type")
    try:
        with _reading(header):
            fields, _ = PreTrainedConfig.get_config_dict(str(path.parent), gguf_file=str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: transformers {__version__} does not read the architecture {architecture} "
            "from GGUF, take the model's folder or Hub id with safetensors"
        ) from error
    tables = [tensor.name for tensor in header.tensors if tensor.name in _ROPE_TABLES]
    if tables:
        raise UserError(
            f"{path} scales RoPE ({tables[0]}), which transformers does not read from GGUF: take "
            "the model's folder or Hub id with safetensors"
        )
    if architecture == "llama":  # a file named mistral too
        fields["model_type"] = "llama"
    fields.setdefault("pad_token_id", None)  # a class of transformers may have another model's
    start, stored = f"{architecture}.", header.fields.items()
    keys = {k.removeprefix(start): x.contents() for k, x in stored if k.startswith(start)}
    fields = complete_fields(str(path), keys, fields)
    info = GGUFInfo(
        file=path.name,
        sha256=file_checksum(path),
        file_type=None if stated is None else LlamaFileType(stated.contents()).name,
        tensor_types=dict(Counter(tensor.tensor_type.name for tensor in header.tensors)),
    )
    return fields, info


def _architecture_of(header: GGUFReader) -> str | None:
    field = header.get_field("general.architecture")
    return None if field is None else field.contents()


@lru_cache(maxsize=1)  # parsing a vocabulary takes seconds, and a model is loaded in several steps
def _header(file: _File) -> GGUFReader:
    """Return a GGUF file's metadata and the list of its tensors.

    Raises:
        UserError: without the package gguf, or for a file that is none or is not whole.
    """
    path = file.path
    if find_spec("gguf") is None:
        raise UserError(f"{path} needs the package gguf: pip install gguf")
    from gguf import GGUFReader

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

    wanted, names = copy(header), cache(gguf.get_tensor_name_map)
    wanted.tensors = [tensor for tensor in header.tensors if is_wanted(tensor.name, n_layers)]
    with (
        patch.multiple(gguf, GGUFReader=lambda _: wanted, get_tensor_name_map=names),
        patch.object(reader, "tqdm", partial(reader.tqdm, disable=True)),
    ):
        yield


def complete_fields(source: str, keys: FileKeys, fields: Fields) -> Fields:
    """Return the fields of a configuration, with all that a file's keys say.

    Args:
        source: the file, for errors.
        keys: its keys.
        fields: the fields that transformers makes of the keys.

    Raises:
        UserError: naming a key that the configuration cannot hold.
    """
    validate_known(source, keys)
    built = _built(fields)
    wanted = {
        key: (next((name for name in names if name in built), None), _value(key, keys[key]))
        for key, names in (SIZES | FIELDS).items()
        if key in keys
    }
    built |= {field: value for field, value in wanted.values() if field}
    rope = rope_parameters(source, built, keys)
    if rope is not None:
        wanted["rope.freq_base"] = ("rope_parameters", rope)
    fields = fields | {field: value for field, value in wanted.values() if field} | _implied(built)
    built = _built(fields)
    for key, (field, value) in wanted.items():
        if key not in SIZES and (built.get(field or "") or None) != value:
            raise _not_read(source, key, keys.get(key))
    return fields


def validate_known(source: str, keys: FileKeys) -> None:
    """Check that each key of positions, norms and factors is one that a configuration can hold.

    Raises:
        UserError: naming a key that none holds.
    """
    for key, value in keys.items():
        decides = key.startswith(("attention.", "rope.")) or key in _FACTORS
        if not decides or key in (*SIZES, *FIELDS, *ROPE, *_READ):
            continue
        if value not in _NEUTRAL.get(key, (0,)):
            raise _not_read(source, key, value)


def rope_parameters(source: str, built: Fields, keys: FileKeys) -> Fields | None:
    """Return a configuration's parameters of RoPE, as a file's keys have them; None without keys.

    Where layers with a window have another RoPE, as in Gemma 3, scaling is of the other layers.

    Raises:
        UserError: naming a key that the parameters cannot hold.
    """
    stated = [key for key in ROPE if key in keys and key != "rope.scaling.original_context_length"]
    before = built.get("rope_parameters")
    if not stated:
        return None
    if before is None:
        raise _not_read(source, stated[0], keys[stated[0]])
    by_kind = "full_attention" in before
    rope = dict(before["full_attention"] if by_kind else before)
    base = keys.get("rope.freq_base", rope["rope_theta"])
    windowed = keys.get("rope.freq_base_swa", base)
    rope["rope_theta"] = base
    rope |= _rotated_part(source, built, rope, keys) | _scaling(source, keys)
    if by_kind:
        of_windows = dict(before["sliding_attention"])
        of_windows["rope_theta"] = keys.get("rope.freq_base_swa", of_windows["rope_theta"])
        return before | {"full_attention": rope, "sliding_attention": of_windows}
    if windowed != base:
        raise _not_read(source, "rope.freq_base_swa", windowed)
    return rope


def _rotated_part(source: str, built: Fields, rope: Fields, keys: FileKeys) -> Fields:
    """Return the part of a head's coordinates that RoPE turns, where it is not as before."""
    d_head = built.get("global_head_dim") or built.get("head_dim") or _width(built)
    before = int(d_head * rope.get("partial_rotary_factor", 1))
    n_turned = keys.get("rope.dimension_count", before)
    if n_turned == before:
        return {}
    if "partial_rotary_factor" not in rope:  # the model turns whole heads
        raise _not_read(source, "rope.dimension_count", n_turned)
    part = n_turned / d_head
    return {"partial_rotary_factor": part if int(d_head * part) == n_turned else nextafter(part, 2)}


def _scaling(source: str, keys: FileKeys) -> Fields:
    """Return the parameters of RoPE's scaling; none for a file without scaling."""
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    kind = keys.get("rope.scaling.type", "linear")
    context = keys.get("rope.scaling.original_context_length")
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or factor == 1 or context is None:
        raise _not_read(source, "rope.scaling.type", kind)
    betas = {
        name: keys[f"rope.scaling.yarn_{name}"]
        for name in ("beta_fast", "beta_slow")
        if f"rope.scaling.yarn_{name}" in keys
    }
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    return scaling | betas


def _implied(built: Fields) -> Fields:
    """Return the fields for which an architecture has no key, as llama.cpp runs it."""
    kind = built["model_type"]
    if kind not in _LAYERS_OF_27B:
        return {}
    is_27b = built["num_hidden_layers"] == _LAYERS_OF_27B[kind]
    return {"query_pre_attn_scalar": _width(built) if is_27b else built["head_dim"]}


def _width(built: Fields) -> int:
    return built["hidden_size"] // built["num_attention_heads"]


def _value(key: str, value: Any) -> Any:
    """Return a key's value as a configuration holds it."""
    if key == "attention.sliding_window_pattern" and isinstance(value, list):
        return ["sliding_attention" if windowed else "full_attention" for windowed in value]
    return value if key in SIZES else value or None  # a window or a cap of 0 is none


def _built(fields: Fields) -> Fields:
    """Return all fields of the configuration that transformers builds of some."""
    return AutoConfig.for_model(**deepcopy(fields)).to_dict()


def _not_read(source: str, key: str, value: Any) -> UserError:
    return UserError(
        f"{source} states {key} = {value}, which transformers does not read from GGUF: take the "
        "model's folder or Hub id with safetensors"
    )
