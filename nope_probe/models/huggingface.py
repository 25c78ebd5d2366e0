"""Load a Hugging Face model, or its first layers, without pickle or remote code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.model_bridge.sources.transformers import determine_architecture_from_hf_config
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN
from transformers.utils import logging

from nope_probe.errors import UserError
from nope_probe.files import read_json, reading
from nope_probe.models.context import is_decoder_class, read_config
from nope_probe.models.gguf import load_gguf, load_gguf_tokenizer
from nope_probe.models.names import is_gguf, offline_if_unreachable, reading_model
from nope_probe.models.parity import Reference, probe_tokens

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
DeviceMap = str | dict[str, Any]  # a strategy, or the device of each part by name


def load_hugging_face(
    source: str,
    *,
    n_layers: int | None = None,
    dtype: torch.dtype,
    revision: str | None = None,
    device_map: DeviceMap | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal decoder with eager attention, and its tokenizer.

    A Llama that was trained without RoPE is loaded as a SmolLM3 without RoPE, which has the same
    weights.

    Args:
        source: a Hub id, a local folder, or a GGUF file here or on the Hub.
        n_layers: load only the first layers; other layers' files and tensors are not read.
        dtype: the dtype of the weights.
        revision: a Hub revision.
        device_map: how Hugging Face places the parts: `auto`, `balanced`, `sequential`, or a device
            per part.

    Raises:
        UserError: for a model that cannot be loaded (offline, gated, missing, broken), or that is
            no causal decoder.
    """
    with _quiet(), offline_if_unreachable(source):
        with reading_model(source, "config.json"):
            config = read_config(source, n_layers=n_layers, revision=revision)
            validate_architecture(source, config)
        with reading_model(source, "tokenizer"):
            tokenizer = load_tokenizer(source, d_vocab=config.vocab_size, revision=revision)
        with reading_model(source, "weights"):
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            options: dict[str, Any] = {
                "config": config,
                "dtype": dtype,
                "attn_implementation": "eager",
                "ignore_mismatched_sizes": True,  # `validate_all_loaded` names them
                "output_loading_info": True,
                "device_map": device_map,
            }
            if is_gguf(source):
                model, report = load_gguf(kind, source, revision, options)
            elif getattr(config, "quantization_config", None):
                model, report = load_quantised(kind, source, revision, options)
            else:
                weights = read_weights(source, n_layers=n_layers, revision=revision)
                model, report = kind.from_pretrained(None, state_dict=weights, **options)
        model.name_or_path = model.config.name_or_path = source
        validate_all_loaded(source, report)
        validate_not_offloaded(source, model)
    return model.eval().requires_grad_(False), tokenizer


def validate_architecture(source: str, config: PreTrainedConfig) -> None:
    """Check that TransformerLens reads a decoder's architecture.

    Raises:
        UserError: naming the nearest architectures that TransformerLens reads.
    """
    try:
        determine_architecture_from_hf_config(config)
    except ValueError as error:
        named = (config.architectures or [config.model_type])[0]
        decoders = [name for name in SUPPORTED_ARCHITECTURES if is_decoder_class(name)]
        near = get_close_matches(named, decoders, n=3, cutoff=0.3)
        raise UserError(
            f"{source} is a {named}, which TransformerLens does not read; the nearest "
            f"architectures that it reads are {', '.join(near)}"
        ) from error


def reference_of(hf: PreTrainedModel) -> Reference:
    """Return plain transformers' outputs on the probe, before a bridge rewires the model."""
    tokens = probe_tokens(hf.config.vocab_size).to(hf.device)
    with torch.inference_mode():
        outputs = hf(tokens, output_attentions=True, use_cache=False)
    attentions = getattr(outputs, "attentions", None) or ()  # a state-space model has none
    patterns = tuple(attention for attention in attentions if attention is not None)
    return Reference(logits=outputs.logits.float(), patterns=patterns)


def validate_all_loaded(source: str, report: dict[str, Any]) -> None:
    """Check that the file has every weight, because Hugging Face draws missing weights at random.

    Raises:
        UserError: naming a weight that is missing or has another shape.
    """
    if report["missing_keys"]:
        raise UserError(f"{source} lacks weights, such as {min(report['missing_keys'])}")
    if report["mismatched_keys"]:
        name = min(key for key, *_ in report["mismatched_keys"])
        raise UserError(
            f"{source} has weights of other shapes than its config.json has, such as {name}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off transformers' messages and progress bars while a model loads."""
    logger: Any = logging
    level, bars = logger.get_verbosity(), logger.is_progress_bar_enabled()
    logger.set_verbosity_error()
    logger.disable_progress_bar()
    try:
        yield
    finally:
        logger.set_verbosity(level)
        if bars:
            logger.enable_progress_bar()


def validate_not_offloaded(source: str, hf: PreTrainedModel) -> None:
    """Check that every weight is on a device, not on disk or in another memory until it is used.

    Raises:
        UserError: naming the first weight that is elsewhere.
    """
    away = [name for name, parameter in hf.named_parameters() if parameter.device.type == "meta"]
    if away:
        raise UserError(
            f"{source} does not fit the devices: {len(away)} of its weights, such as {away[0]}, "
            "would be offloaded and cannot be read; take fewer --layers or a smaller --dtype"
        )


def load_tokenizer(
    source: str, *, d_vocab: int, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that embeds d_vocab tokens.

    The model may embed more tokens than the tokenizer has, because vocabularies are padded.

    Raises:
        UserError: for ids that the model does not embed.
    """
    if is_gguf(source):
        tokenizer = load_gguf_tokenizer(source, revision)
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= d_vocab:
        raise UserError(
            f"the tokenizer of {source} has ids up to {largest}, but the model embeds only "
            f"{d_vocab} tokens: they do not belong together"
        )
    tokenizer("a")  # some broken files fail only now
    return tokenizer


def read_weights(
    source: str, *, n_layers: int | None = None, revision: str | None = None
) -> dict[str, Tensor]:
    """Read the tensors of a model, or of its first blocks.

    In a sharded checkpoint, only the files that hold these tensors are opened, or downloaded from
    the Hub.

    Args:
        source: a Hub id or a local folder.
        n_layers: how many first blocks; all by default.
        revision: a Hub revision.

    Raises:
        UserError: for pickled weights, or for a missing or broken file, which it names.
    """
    weights: dict[str, Tensor] = {}
    index = _find(source, INDEX, revision)
    if index is not None:
        for name, keys in shards_of(index, n_layers).items():
            shard = _find(source, name, revision)
            if shard is None:
                raise UserError(f"{source} lacks {name}, which its {INDEX} lists")
            weights |= _read(shard, keys)
        return weights
    single = _find(source, SINGLE, revision)
    if single is None:
        raise UserError(f"{source} has no safetensors weights; pickled ones are refused")
    return _read(single, None, n_layers)


def shards_of(index: Path, n_layers: int | None) -> dict[str, list[str]]:
    """Return the tensors to read from each file that is needed.

    Raises:
        UserError: for a broken index.
    """
    files: dict[str, list[str]] = {}
    with reading(f"{index} is no valid index of safetensors files"):
        for key, file in read_json(index)["weight_map"].items():
            if is_wanted(key, n_layers):
                files.setdefault(file, []).append(key)
    return files


def is_wanted(key: str, n_layers: int | None) -> bool:
    """Return whether a tensor belongs to no block or to one of the first n_layers.

    Example:
        >>> is_wanted("model.layers.2.mlp.up_proj.weight", 2), is_wanted("model.norm.weight", 2)
        (False, True)
    """
    block = _BLOCK.search(key)
    return n_layers is None or block is None or int(block[1]) < n_layers


def _find(source: str, name: str, revision: str | None) -> Path | None:
    """Return a file's path in a local folder, or in the cache after downloading it from the Hub."""
    if Path(source).is_dir():
        file = Path(source, name)
        return file if os.path.isfile(file) else None
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except LocalEntryNotFoundError:
        if name == INDEX:  # offline, the cache of a single-file model has no index
            return None
        raise
    except EntryNotFoundError:
        return None


def _read(
    file: Path, keys: list[str] | None = None, n_layers: int | None = None
) -> dict[str, Tensor]:
    """Read some tensors of a file, by default the tensors of the first blocks."""
    with (
        reading(f"{file} is a broken safetensors file"),
        safetensors.safe_open(file, framework="pt") as opened,
    ):
        wanted = [k for k in opened.keys() if is_wanted(k, n_layers)] if keys is None else keys  # noqa: SIM118
        return {key: opened.get_tensor(key) for key in wanted}


# Loaders of these methods can return plain weights; other methods are undone afterwards.
UNDONE_WHILE_LOADING = ("fp8", "mxfp4", "compressed-tensors")


def load_quantised(
    kind: type[PreTrainedModel], source: str, revision: str | None, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a quantised checkpoint and undo the quantisation at once.

    Gains and untrained weights need plain numbers, not packed weights. Some kernels also repack
    weights in their first forward pass.

    Args:
        kind: the model's class.
        source: a Hub id or a local folder.
        revision: a Hub revision.
        options: further arguments of `from_pretrained`, whose `config` may be changed.

    Raises:
        UserError: for a method that transformers does not know, or cannot undo on this machine.
    """
    fields = options["config"].quantization_config
    fields = fields if isinstance(fields, dict) else fields.to_dict()
    method = str(fields.get("quant_method"))
    if method in UNDONE_WHILE_LOADING:
        options["config"].quantization_config = fields | {"dequantize": True}
    try:
        # transformers ignores an unknown method; it names bitsandbytes by bit width.
        if method not in KNOWN and f"{method}_4bit" not in KNOWN:
            raise NotImplementedError("transformers does not know this method")
        model, report = kind.from_pretrained(
            source, revision=revision, use_safetensors=True, **options
        )
        if getattr(model, "is_quantized", False):
            model = model.dequantize()
        if not all(parameter.is_floating_point() for parameter in model.parameters()):
            raise NotImplementedError("its weights stay packed")
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source} is quantised ({method}), and its weights cannot be read as plain numbers: "
            f"take the unquantised model ({reason})"
        ) from error
    return model, report
