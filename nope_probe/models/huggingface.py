"""Load a Hugging Face model, without pickle or remote code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError
from nope_probe.models.hf_config import read_config
from nope_probe.models.hf_tokenizer import load_tokenizer
from nope_probe.models.hf_weights import is_quantised, load_quantised, read_weights
from nope_probe.models.hub import not_cached, offline_if_unreachable

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
    with _quiet(), _as_user_errors(source), reach:
        config = read_config(source, n_layers=n_layers, revision=revision)
        tokenizer = load_tokenizer(source, d_vocab=config.vocab_size, revision=revision)
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
    try:
        return kind.from_pretrained(None, state_dict=weights, **options)
    except ValueError as error:
        if device_map is None:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--device-map cannot place {source}: {reason}") from error


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
def _as_user_errors(source: str) -> Iterator[None]:
    """Raise a UserError of one line for what Hugging Face raises."""
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
            raise not_cached(source) from error
        raise UserError(f"cannot load {source}: {' '.join(str(error).split())[:300]}") from error


def _ungated(source: str) -> str:
    """Return the id of an ungated copy of a gated model: Unsloth has those of Meta's."""
    owner, _, name = source.partition("/")
    return f"unsloth/{name}" if owner == "meta-llama" else "unsloth/Llama-3.1-8B"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
