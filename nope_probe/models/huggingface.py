"""Load a Hugging Face model, or its first layers, without pickle or remote code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN
from transformers.utils import logging

from nope_probe.errors import UserError
from nope_probe.files import JsonObject
from nope_probe.hooks.layers.bridges import name_architecture
from nope_probe.hooks.layers.objects import validate_on_devices
from nope_probe.hooks.layers.reference import class_of, text_config_of, text_part
from nope_probe.models.context import read_config
from nope_probe.models.gguf import load_gguf, load_gguf_tokenizer
from nope_probe.models.names import ADAPTER, is_gguf, offline_if_unreachable, reading_model
from nope_probe.models.weights import (
    cut_to_depth,
    find_file,
    is_wanted,
    merge_adapter,
    read_weights,
    unread_weights,
    weight_files,
)

# Causal masks, which older versions of transformers stored.
_MASKS = re.compile(r"(^|\.)(attn|attention|self_attention)\.(masked_)?bias$")
# A tokenizer has one of these files; nearly all have the first.
_TOKENIZERS = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
)
DeviceMap = str | dict[str, int | str]  # a strategy, or the device of each part by name


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A causal decoder in plain transformers, or a multimodal model that has one.

    Attributes:
        model: the model, frozen, with eager attention.
        tokenizer: its tokenizer; None if its folder has none.
        adapter: the kind of the adapter that is merged into its weights; None without an adapter.
        unused: the tensors of its files that it does not use.
        unread: the files of other weights in its folder.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    adapter: str | None
    unused: tuple[str, ...]
    unread: tuple[str, ...]


def load_hugging_face(
    source: str,
    *,
    n_layers: int | None = None,
    dtype: torch.dtype,
    revision: str | None = None,
    device_map: DeviceMap | None = None,
    allow_unused: bool = False,
    adapters: Sequence[str] = (),
) -> Decoder:
    """Load a causal decoder with eager attention, and its tokenizer.

    A Llama that was trained without RoPE is loaded as a SmolLM3 without RoPE, which has the same
    weights. An adapter in the model's folder is merged into its weights.

    Args:
        source: a Hub id, a local folder, or a GGUF file here or on the Hub.
        n_layers: load only the first layers; other layers' files and tensors are not read.
        dtype: the dtype of the weights.
        revision: a Hub revision.
        device_map: how Hugging Face places the parts: `auto`, `balanced`, `sequential`, or a device
            per part.
        allow_unused: load a model whose files hold tensors that it does not use.
        adapters: folders of adapters, which are merged into the weights one after the other.

    Raises:
        UserError: for a model that cannot be loaded (offline, gated, missing, broken), that is no
            causal decoder, or whose files hold more than it uses.
    """
    with _quiet(), offline_if_unreachable(source):
        with reading_model(source, "config.json"):
            config = read_config(source, n_layers=n_layers, revision=revision)
            text = text_config_of(config)
            name_architecture(source, text, [class_of(text).__name__])
        with reading_model(source, "tokenizer"):
            tokenizer = load_tokenizer(source, d_vocab=text.vocab_size, revision=revision)
        with reading_model(source, "weights"):
            options: JsonObject = {
                "config": config,
                "dtype": dtype,
                "attn_implementation": "eager",
                "ignore_mismatched_sizes": True,  # `validate_all_loaded` names them
                "output_loading_info": True,
                "device_map": device_map,
            }
            model, unexpected = _load_model(source, n_layers, revision, options)
            named = getattr(config, "transformers_weights", None)
            is_folder = Path(source).is_dir()
            read, files = weight_files(source, revision, named) if is_folder else ("", {})
        kinds, unused = [], set[str]()
        for folder in (source, *adapters):
            with reading_model(folder, "adapter"):
                model, kind, others = merge_adapter(folder, model, n_layers, revision)
                kinds += [kind] if kind is not None else []
                unused |= others
                if folder != source and has_tokenizer(folder):
                    embedded = model.get_input_embeddings().num_embeddings
                    tokenizer = load_tokenizer(folder, d_vocab=embedded)
    unused |= {name for name in unexpected if is_wanted(name, n_layers) and not _MASKS.search(name)}
    if not allow_unused:
        validate_all_used(source, model, unused)
    unread = unread_weights(source, {read, *files}) if is_folder else ()
    if unread:
        warnings.warn(
            f"{source} holds more than one set of weights: like transformers, nope_probe read "
            f"{read}, and left out {', '.join(unread[:3])}{', ...' * (len(unread) > 3)} "
            f"({len(unread)} in all)",
            stacklevel=3,
        )
    return Decoder(
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        adapter=" + ".join(kinds) or None,
        unused=tuple(sorted(unused)),
        unread=unread,
    )


def _load_model(
    source: str, n_layers: int | None, revision: str | None, options: JsonObject
) -> tuple[PreTrainedModel, Collection[str]]:
    """Load a model without its adapter, and return the tensors that transformers did not use too.

    Of a multimodal model, only tensors of the text decoder count as missing or not used.

    Raises:
        UserError: for weights that are missing, of another shape, or not on a device.
    """
    config = options["config"]
    kind = class_of(config)
    if is_gguf(source):
        model, report = load_gguf(kind, source, revision, options)
    elif getattr(config, "quantization_config", None):
        model, report = load_quantised(kind, source, revision, options)
    else:
        named = getattr(config, "transformers_weights", None)
        weights = read_weights(source, n_layers=n_layers, revision=revision, named=named)
        if n_layers is not None:
            with init_empty_weights():
                cut_to_depth(weights, kind(config))
        model, report = kind.from_pretrained(None, state_dict=weights, **options)
    model.name_or_path = model.config.name_or_path = source
    if text_config_of(config) is not config:  # what sees or hears is not measured
        within = text_part(model)
        for names in ("missing_keys", "unexpected_keys"):
            report[names] = {name for name in report[names] if name.startswith(within)}
        wrong = report["mismatched_keys"]
        report["mismatched_keys"] = {found for found in wrong if found[0].startswith(within)}
    validate_all_loaded(source, report)
    validate_on_devices(source, model)
    return model, report["unexpected_keys"]


def validate_all_loaded(source: str, report: JsonObject) -> None:
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


def validate_all_used(source: str, model: PreTrainedModel, unused: Collection[str]) -> None:
    """Check that a model uses all tensors of its files.

    Raises:
        UserError: naming a tensor that the model does not use.
    """
    if unused:
        raise UserError(
            f"{source} has tensors that a {type(model).__name__} does not use, such as "
            f"{min(unused)} ({len(unused)} in all): another class may be the model's; "
            "--allow-unused (allow_unused=True) loads the model without them"
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


def load_tokenizer(
    source: str, *, d_vocab: int, revision: str | None = None
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model that embeds d_vocab tokens; None if it has none.

    The model may embed more tokens than the tokenizer has, because vocabularies are padded. Special
    tokens that were added to the tokenizer, such as a padding token, may be beyond the embedding.

    Raises:
        UserError: for ids that the model does not embed.
    """
    if is_gguf(source):
        tokenizer = load_gguf_tokenizer(source, revision)
    elif has_tokenizer(source, revision):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        # TransformerLens loads it again with these arguments, else of `main`.
        tokenizer.init_kwargs |= {"revision": revision} if revision else {}
    else:
        tokenizer = None
    if tokenizer is None:
        return None
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    begins_and_ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    used = {*tokenizer.get_vocab().values()} - (added - begins_and_ends)
    largest = max(used, default=-1)
    if largest >= d_vocab:
        raise UserError(
            f"the tokenizer of {source} has ids up to {largest}, but the model embeds only "
            f"{d_vocab} tokens: they do not belong together"
        )
    tokenizer("a")  # some broken files fail only now
    return tokenizer


def has_tokenizer(source: str, revision: str | None = None) -> bool:
    """Return whether a model on the Hub or in a folder has files of a tokenizer.

    Offline, a model on the Hub of which the cache has none counts as one with a tokenizer.
    """
    try:
        return any(find_file(source, name, revision) is not None for name in _TOKENIZERS)
    except LocalEntryNotFoundError:
        return True


# Loaders of these methods can return plain weights; other methods are undone afterwards.
UNDONE_WHILE_LOADING = ("fp8", "mxfp4", "compressed-tensors")


def load_quantised(
    kind: type[PreTrainedModel], source: str, revision: str | None, options: JsonObject
) -> tuple[PreTrainedModel, JsonObject]:
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
    if find_file(source, ADAPTER, revision) is not None:
        raise UserError(
            f"{source} has quantised weights and an adapter ({ADAPTER}), which is not read: put it "
            "into the folder of the unquantised model"
        )
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
