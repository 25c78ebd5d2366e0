"""Find a Hugging Face model by name, and load it without pickle or remote code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.config import read_config
from nope_probe.errors import UserError
from nope_probe.placement import DeviceMap, refuse_offloaded
from nope_probe.quantised import is_quantised, load_quantised
from nope_probe.tokenizer import load_tokenizer
from nope_probe.weights import read_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_SHIPPED = Path(__file__).parent / "checkpoints"
CHECKPOINTS = {name: _SHIPPED / name for name in ("nope-tiny", "rope-tiny")}

FRIENDLY = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "phi-4": "microsoft/phi-4",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "nope-1.5b": "starmpcc/NoPE_1.5B_FW_EDU_15T",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "tinyllama-nope": "AntNLP/TinyLlama-NoPE-1.1B",
}
NAMES = ("parameter-free", "parameter-free-rope", *CHECKPOINTS, *FRIENDLY)


def resolve(name: str) -> str:
    """Turn a friendly name, a Hub id or a folder into what Hugging Face loads.

    Raises:
        UserError: for a folder without a config, or a name that is none of these (with the nearest
            known names).
    """
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"the folder {name} has no config.json: it is no Hugging Face model")
        return str(folder)
    if name.lower() in FRIENDLY:
        return FRIENDLY[name.lower()]
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name
    near = get_close_matches(name.lower(), NAMES, n=3, cutoff=0.3) or NAMES
    raise UserError(
        f"unknown model {name!r}; the nearest names are {', '.join(near)}; a Hub id "
        "(owner/name) or a local folder works too"
    )


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
        _refuse_random_weights(source, report)
        refuse_offloaded(source, model)
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


def _refuse_random_weights(source: str, report: dict[str, Any]) -> None:
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
