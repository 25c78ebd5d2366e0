"""A model's context: how many positions it takes, as its config.json says, and whether more work.

RoPE and models without position encoding go on beyond the context. A table of positions (learned
embeddings, GPT-J's angles, MPT's ALiBi) ends there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from nope_probe.errors import UserError
from nope_probe.files import read_json
from nope_probe.models.hub import offline_if_unreachable, reading_model
from nope_probe.models.names import CHECKPOINTS, PARAMETER_FREE, PARAMETER_FREE_CONTEXT, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Tensors with a row for each position. XGLM's sinusoids (`embed_positions.weights`) grow.
_TABLE = re.compile(
    r"(^|\.)(wpe\.weight|embed_positions(\.weight)?|(position_embeddings|positions_embed)\.weight)$"
)


def configured_context(name: str, revision: str | None = None) -> int | None:
    """Return how many positions a model takes, by its config.json; None where it does not say.

    Args:
        name: a model's name, as `load` takes it.
        revision: a Hub revision.

    Raises:
        UserError: for a configuration that cannot be read, or is that of no causal decoder.

    Example:
        >>> configured_context("rope-tiny"), configured_context("parameter-free")
        (256, 4096)
    """
    if name.lower() in PARAMETER_FREE:
        return PARAMETER_FREE_CONTEXT
    text = _config_of(name, revision).get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the second is MPT's
    return next((getattr(text, name) for name in names if getattr(text, name, None)), None)


def stated_lengths(name: str, revision: str | None = None) -> dict[str, int]:
    """Return the lengths that a model's files state, in tokens.

    `context` is the number of positions that it takes, `original context` that before RoPE was
    scaled, and `trained length` that of the sequences that a model of ours was trained on.

    Example:
        >>> stated_lengths("nope-tiny")
        {'context': 256, 'trained length': 128}
    """
    lengths = {"context": configured_context(name, revision)}
    if name.lower() not in PARAMETER_FREE:
        text = _config_of(name, revision).get_text_config()
        scaling = getattr(text, "rope_parameters", None) or {}
        original = getattr(text, "original_max_position_embeddings", None)
        if isinstance(scaling, dict):
            original = scaling.get("original_max_position_embeddings", original)
        lengths["original context"] = original
        folder = Path(CHECKPOINTS.get(name.lower(), name))
        if (folder / "training.json").is_file():
            recipe = read_json(folder / "training.json").get("recipe", {})
            lengths["trained length"] = recipe.get("seq_len")
    return {kind: int(length) for kind, length in lengths.items() if length}


def validate_context(
    name: str, seq_len: int, *, beyond: bool = False, revision: str | None = None
) -> None:
    """Check that a model takes sequences of some length, before its weights are read.

    Args:
        name: a model's name, as `load` takes it.
        seq_len: tokens in a sequence.
        beyond: whether sequences may be longer than the context.
        revision: a Hub revision.

    Raises:
        UserError: for a sequence beyond the context that was not asked for, or that no model with a
            table of positions can take.
    """
    n_ctx = configured_context(name, revision)
    if n_ctx is None or seq_len <= n_ctx:
        return
    if has_position_table(name, revision):
        raise beyond_table(seq_len, n_ctx)
    if not beyond:
        raise beyond_context(seq_len, n_ctx)


def beyond_context(seq_len: int, n_ctx: int) -> UserError:
    """Return the error for a sequence beyond the context that was not asked for."""
    return UserError(
        f"--seq-len {seq_len} is beyond the model's context {n_ctx}: take --beyond-context, or "
        "shorter sequences"
    )


def beyond_table(seq_len: int, n_ctx: int) -> UserError:
    """Return the error for a sequence beyond a model's table of positions."""
    return UserError(
        f"--seq-len {seq_len} is beyond the model's context {n_ctx}, where its table of positions "
        "ends: --beyond-context cannot help, take shorter sequences"
    )


def has_position_table(name: str, revision: str | None = None) -> bool:
    """Return whether a model looks positions up in a table, which has no rows beyond its context.

    The model's modules are made without storage for weights, from its config.json.

    Example:
        >>> has_position_table("rope-tiny")
        False
    """
    if name.lower() in (*CHECKPOINTS, *PARAMETER_FREE):
        return False
    import torch
    from transformers import AutoModelForCausalLM

    config = _config_of(name, revision)
    if config.model_type == "mpt":  # its biases are made for the configured length in each pass
        return True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return any(_TABLE.search(tensor) for tensor in tensors)


def _config_of(name: str, revision: str | None) -> PreTrainedConfig:
    from nope_probe.models.hf_config import read_config

    source = str(CHECKPOINTS.get(name.lower()) or resolve(name))
    with offline_if_unreachable(source), reading_model(source, "config.json"):
        return read_config(source, revision=revision)
