"""Find a Hugging Face model by name, and load it without pickle or remote code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError
from nope_probe.models.hf_config import read_config
from nope_probe.models.hf_tokenizer import load_tokenizer
from nope_probe.models.hf_weights import is_quantised, load_quantised, read_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_hugging_face(
    source: str,
    *,
    n_layers: int | None = None,
    dtype: torch.dtype,
    revision: str | None = None,
    device_map: DeviceMap | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal decoder and its tokenizer, eager attention, the first layers only if asked.

    Only the files and tensors of these layers, the embeddings and the head are read. A Llama that
    was trained without RoPE comes as the SmolLM3 without RoPE that has its weights. With a
    device_map (auto, balanced, sequential or a device per part) Hugging Face places the parts.

    Raises:
        UserError: if it cannot be had (offline, gated, missing, broken) or is no causal decoder.
    """
    with _quiet(), _one_line(source):
        config = read_config(source, n_layers=n_layers, revision=revision)
        tokenizer = load_tokenizer(source, d_vocab=config.vocab_size, revision=revision)
        model, report = _model(source, config, n_layers, dtype, revision, device_map)
        model.name_or_path = model.config.name_or_path = source
        _validate_random_weights(source, report)
        validate_offloaded(source, model)
    return model.eval().requires_grad_(False), tokenizer


def _model(
    source: str,
    config: PreTrainedConfig,
    n_layers: int | None,
    dtype: torch.dtype,
    revision: str | None,
    device_map: DeviceMap | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model from the tensors it needs."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "eager",
        "ignore_mismatched_sizes": True,  # they are refused, by name
        "output_loading_info": True,
        "device_map": device_map,
    }
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if is_quantised(config):
        return load_quantised(kind, source, revision, options)
    weights = read_weights(source, n_layers=n_layers, revision=revision)
    try:
        return kind.from_pretrained(None, state_dict=weights, **options)
    except ValueError as error:
        if device_map is None:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--device-map cannot place {source}: {reason}") from error


def _validate_random_weights(source: str, report: dict[str, Any]) -> None:
    """Hugging Face draws what a file does not hold, or holds in another shape, at random."""
    if report["missing_keys"]:
        raise UserError(f"{source} lacks weights, such as {min(report['missing_keys'])}")
    if report["mismatched_keys"]:
        name = min(key for key, *_ in report["mismatched_keys"])
        raise UserError(
            f"{source} has weights of other shapes than its config says, such as {name}"
        )


@contextmanager
def _one_line(source: str) -> Iterator[None]:
    """Turn what Hugging Face raises for a model that cannot be had into one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        causes = list(_chain(error))
        if any(isinstance(cause, GatedRepoError) for cause in causes):
            raise UserError(
                f"{source} is gated: accept its licence on the Hub and set HF_TOKEN, or use a "
                f"local folder or an ungated copy such as {_ungated(source)}"
            ) from error
        if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
            raise UserError(f"there is no model {source} on the Hub") from error
        if any(isinstance(cause, LocalEntryNotFoundError) for cause in causes):
            raise UserError(
                f"{source} is not in the local cache and the Hub cannot be reached (offline); "
                "a local folder works"
            ) from error
        raise UserError(f"cannot load {source}: {' '.join(str(error).split())[:300]}") from error


def _ungated(source: str) -> str:
    """Name a copy of a gated model that needs no licence: Unsloth keeps those of Meta's."""
    owner, _, name = source.partition("/")
    return f"unsloth/{name}" if owner == "meta-llama" else "unsloth/Llama-3.1-8B"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' notes and progress bars off the terminal while a model loads."""
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


DeviceMap = str | dict[str, Any]  # a strategy, or the device of each part by name


def validate_offloaded(source: str, hf: PreTrainedModel) -> None:
    """Refuse a model of which parts wait elsewhere until they are run.

    Raises:
        UserError: naming the first such part.
    """
    away = [name for name, each in hf.named_parameters() if each.device.type == "meta"]
    if away:
        raise UserError(
            f"{source} does not fit the devices: {len(away)} of its weights, such as {away[0]}, "
            "would be kept elsewhere, where they cannot be read; study fewer --layers, or take a "
            "smaller --dtype"
        )
