"""How many positions a model takes, by its config.json alone: known before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nope_probe.errors import UserError
from nope_probe.files import read_json
from nope_probe.models.names import PARAMETER_FREE, PARAMETER_FREE_CONTEXT, folder_of, resolve

# Fields of a config.json, in the order in which TransformerLens looks for them. `n_ctx` is none of
# them: where GPT-2's holds it, its positions are `n_positions` all the same.
_FIELDS = (
    "n_positions",
    "max_position_embeddings",
    "max_context_length",
    "seq_length",  # BLOOM
    "max_seq_len",  # MPT, DBRX
    "max_sequence_length",
)
_OF_TEXT = "text_config"  # of models that read more than text, such as Gemma 3 and Llama 4


def validate_seq_len(seq_len: int, n_ctx: int | None) -> None:
    """Check that sequences are no longer than a model's context, if it is known.

    Raises:
        UserError: with both lengths.
    """
    if n_ctx is not None and seq_len > n_ctx:
        raise UserError(f"--seq-len {seq_len} is beyond the model's context {n_ctx}")


def configured_context(name: str, revision: str | None = None) -> int | None:
    """Return how many positions a model takes, by its config.json; None where that is not known.

    It is not known where the field is left out for transformers' own default, or where the file
    cannot be read: what is wrong with it is found, and told, when the model is loaded.

    Args:
        name: a model's name, as `load` takes it.
        revision: a Hub revision.

    Example:
        >>> configured_context("rope-tiny"), configured_context("parameter-free")
        (256, 4096)
    """
    if name.lower() in PARAMETER_FREE:
        return PARAMETER_FREE_CONTEXT
    folder = folder_of(name)
    config = _hub_config(resolve(name), revision) if folder is None else folder / "config.json"
    fields = {} if config is None else _fields(config)
    if isinstance(fields.get(_OF_TEXT), dict):
        fields = fields[_OF_TEXT]
    named = [fields[field] for field in _FIELDS if field in fields]
    return named[0] if named and isinstance(named[0], int) and named[0] > 0 else None


def _fields(config: Path) -> dict[str, Any]:
    try:
        fields = read_json(config)
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _hub_config(source: str, revision: str | None) -> Path | None:
    """Return the config.json of a model on the Hub, downloaded if need be; None without one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from nope_probe.models.hub import offline_if_unreachable

    unavailable = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
    with offline_if_unreachable():
        try:
            return Path(hf_hub_download(source, "config.json", revision=revision))
        except unavailable:
            return None
