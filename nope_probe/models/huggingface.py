"""Load a Hugging Face model, without pickle or remote code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError, stderr_held
from nope_probe.models.hf_config import (
    class_name,
    count_numbers,
    read_config,
    remote_code_error,
    validate_fits,
)
from nope_probe.models.hf_weights import is_quantised, load_quantised, read_weights
from nope_probe.models.hub import offline_if_unreachable, reading_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

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
        source: a Hub id or a local folder.
        n_layers: load only the first layers; other layers' files and tensors are not read.
        dtype: of the weights.
        revision: a Hub revision.
        device_map: how Hugging Face places the parts: `auto`, `balanced`, `sequential`, or a device
            per part.

    Raises:
        UserError: if it cannot be loaded (offline, gated, missing, broken) or is no causal decoder.
    """
    reach = nullcontext() if Path(source).is_dir() else offline_if_unreachable()
    with _quiet(), reach:
        with reading_model(source, "config.json"):
            config = read_config(source, n_layers=n_layers, revision=revision)
            n_numbers = 0 if is_quantised(config) else count_numbers(_kind(config), config)
        with reading_model(source, "tokenizer"), stderr_held():
            tokenizer = load_tokenizer(source, d_vocab=config.vocab_size, revision=revision)
        with reading_model(source, "weights"):
            model, report = _model(source, config, n_layers, dtype, revision, device_map, n_numbers)
            model.name_or_path = model.config.name_or_path = source
            validate_all_loaded(source, report)
            validate_not_offloaded(source, model)
    return model.eval().requires_grad_(False), tokenizer


def _model(
    source: str,
    config: PreTrainedConfig,
    n_layers: int | None,
    dtype: torch.dtype,
    revision: str | None,
    device_map: DeviceMap | None,
    n_numbers: int,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model with its weights, and transformers' report of what was loaded."""
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "eager",
        "ignore_mismatched_sizes": True,  # `validate_all_loaded` names them
        "output_loading_info": True,
        "device_map": device_map,
    }
    if is_quantised(config):
        return load_quantised(_kind(config), source, revision, options)
    weights = read_weights(source, n_layers=n_layers, revision=revision)
    validate_fits(source, n_numbers, weights)
    try:
        return _kind(config).from_pretrained(None, state_dict=weights, **options)
    except ValueError as error:
        if device_map is None:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--device-map cannot place {source}: {reason}") from error


def _kind(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of causal decoder for a configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def validate_all_loaded(source: str, report: dict[str, Any]) -> None:
    """Check that the file has every weight: Hugging Face draws the others at random.

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
    from transformers.utils import logging

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
        UserError: naming the first weight that is not.
    """
    away = [name for name, each in hf.named_parameters() if each.device.type == "meta"]
    if away:
        raise UserError(
            f"{source} does not fit the devices: {len(away)} of its weights, such as {away[0]}, "
            "would be offloaded and cannot be read; take fewer --layers or a smaller --dtype"
        )


def load_tokenizer(
    source: str, *, d_vocab: int, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that embeds d_vocab tokens.

    Raises:
        UserError: if it needs remote code, if a file is broken, or for ids that the model does not
            embed.
    """
    from transformers import AutoTokenizer

    validate_no_remote_tokenizer(source, revision)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    validate_vocabulary(source, tokenizer, d_vocab)
    tokenizer("a")  # what is wrong with some files shows only now
    return tokenizer


def validate_no_remote_tokenizer(source: str, revision: str | None = None) -> None:
    """Check that a tokenizer's class is in transformers, not in the model's own folder.

    Raises:
        UserError: naming the class that would have to be run.
    """
    from transformers.models.auto.tokenization_auto import (
        get_tokenizer_config,
        tokenizer_class_from_name,
    )

    auto_map = get_tokenizer_config(source, revision=revision).get("auto_map") or ()
    if isinstance(auto_map, Mapping):
        auto_map = auto_map.get("AutoTokenizer") or ()
    names = [auto_map] if isinstance(auto_map, str) else [name for name in auto_map if name]
    if names and not any(tokenizer_class_from_name(class_name(str(name))) for name in names):
        raise remote_code_error(source, names[0])


def validate_vocabulary(source: str, tokenizer: PreTrainedTokenizerBase, d_vocab: int) -> None:
    """Check that a model embeds every token; it may embed more, since vocabularies are padded.

    Raises:
        UserError: naming the largest id.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= d_vocab:
        raise UserError(
            f"the tokenizer of {source} has ids up to {largest}, but the model embeds only "
            f"{d_vocab} tokens: they do not belong together"
        )
