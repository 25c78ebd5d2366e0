"""Load a Hugging Face model, without pickle or remote code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError
from nope_probe.models.hf_config import read_config, validate_architecture
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
    with _quiet(), offline_if_unreachable(source):
        with reading_model(source, "config.json"):
            config = read_config(source, n_layers=n_layers, revision=revision)
            validate_architecture(source, config)
        with reading_model(source, "tokenizer"):
            tokenizer = load_tokenizer(source, d_vocab=config.vocab_size, revision=revision)
        with reading_model(source, "weights"):
            model, report = _model(source, config, n_layers, dtype, revision, device_map)
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
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model with its weights, and transformers' report of what was loaded."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "eager",
        "ignore_mismatched_sizes": True,  # `validate_all_loaded` names them
        "output_loading_info": True,
        "device_map": device_map,
    }
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if is_quantised(config):
        return load_quantised(kind, source, revision, options)
    weights = read_weights(source, n_layers=n_layers, revision=revision)
    return kind.from_pretrained(None, state_dict=weights, **options)


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
    """Load the tokenizer of a model that embeds d_vocab tokens, or more: vocabularies are padded.

    Raises:
        UserError: for ids that the model does not embed.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= d_vocab:
        raise UserError(
            f"the tokenizer of {source} has ids up to {largest}, but the model embeds only "
            f"{d_vocab} tokens: they do not belong together"
        )
    tokenizer("a")  # what is wrong with some files shows only now
    return tokenizer
