"""A model's config.json: its first layers, and its context.

Models that are no causal decoders, and models that need remote code, are refused here, before any
weight is read.

The context is the number of positions that a model takes. Models with RoPE or without position
encoding run beyond it. A table of positions (learned embeddings, GPT-J's angles, MPT's ALiBi) ends
with the context.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, SmolLM3Config
from transformers.models.auto import modeling_auto as auto

from nope_probe.errors import TooFewLayersError, UserError, beyond_context
from nope_probe.files import JsonObject
from nope_probe.hooks.layers.reference import context_in, is_decoder_class, text_config_of
from nope_probe.models.gguf import read_gguf_config
from nope_probe.models.names import (
    CHECKPOINTS,
    PARAMETER_FREE,
    PARAMETER_FREE_CONTEXT,
    is_gguf,
    offline_if_unreachable,
    reading_model,
    resolve,
)

# Tensors with a row per position. XGLM's sinusoids (`embed_positions.weights`) can grow.
_TABLE = re.compile(
    r"(^|\.)(wpe\.weight|embed_positions(\.weight)?|(position_embeddings|positions_embed)\.weight)$"
)


def configured_context(name: str, revision: str | None = None) -> int | None:
    """Return how many positions a model takes, from its config.json; None if it is not there.

    Args:
        name: a model's name, as `load` takes it.
        revision: a Hub revision.

    Raises:
        UserError: for a configuration that cannot be read, or of no causal decoder.

    Example:
        >>> configured_context("rope-tiny"), configured_context("parameter-free")
        (256, 4096)
    """
    if name.lower() in PARAMETER_FREE:
        return PARAMETER_FREE_CONTEXT
    return context_in(_config_of(name, revision))


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
        UserError: for a sequence beyond the context without `beyond`, or beyond a table of
            positions.
    """
    n_ctx = configured_context(name, revision)
    if n_ctx is None or seq_len <= n_ctx:
        return
    has_table = has_position_table(name, revision)
    if has_table or not beyond:
        raise beyond_context(seq_len, n_ctx, has_table=has_table)


def has_position_table(name: str, revision: str | None = None) -> bool:
    """Return whether a model looks positions up in a table, which ends with its context.

    The model's modules are made from its config.json, without storage for weights.

    Example:
        >>> has_position_table("rope-tiny")
        False
    """
    if name.lower() in (*CHECKPOINTS, *PARAMETER_FREE):
        return False
    config = _config_of(name, revision)
    if config.model_type == "mpt":  # makes biases for the configured length in each pass
        return True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return any(_TABLE.search(tensor) for tensor in tensors)


def _config_of(name: str, revision: str | None) -> PreTrainedConfig:
    source = resolve(name)
    with offline_if_unreachable(source), reading_model(source, "config.json"):
        return text_config_of(read_config(source, revision=revision))


# The paper's checkpoint and TinyLlama-NoPE are of type Llama, and were trained without RoPE.
WITHOUT_ROPE = ("starmpcc/nope_1.5b_fw_edu_15t", "antnlp/tinyllama-nope-1.1b")


def read_config(
    source: str, *, n_layers: int | None = None, revision: str | None = None
) -> PreTrainedConfig:
    """Read a causal decoder's configuration, reduced to the first layers if asked.

    Of a multimodal model, it is the whole model's, in which the text decoder's is reduced.

    A Llama that was trained without RoPE gets the configuration of a SmolLM3 without RoPE, which
    has the same weights.

    Raises:
        UserError: for a model that needs remote code, or that is no causal decoder.
        TooFewLayersError: for more layers than the model has.
    """
    without_rope = "/".join(Path(source).parts[-2:]).lower() in WITHOUT_ROPE
    if is_gguf(source):
        config = read_gguf_config(source, revision)
    else:
        fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        if not without_rope:
            validate_no_remote_code(source, fields)
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    text = text_config_of(config)
    if text.architectures is None:  # of a GGUF file, or left out of a config.json
        named = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
        text.architectures = None if named is None else [named]
    validate_causal_decoder(source, text)
    validate_windows(source, text)
    if n_layers is not None:
        within = config if text is config else config.text_config
        _keep_first_layers(source, within, n_layers)
    return _without_rope(config) if without_rope else config


def validate_no_remote_code(source: str, fields: JsonObject) -> None:
    """Check that a model's class is in transformers, not in the model's folder.

    A folder may hold code for a model that transformers has too (Phi-3 does). The class of the
    same name in transformers is then used.

    Args:
        source: a Hub id or a local folder.
        fields: its config.json.

    Raises:
        UserError: naming the class in the remote code.
    """
    named = (fields.get("auto_map") or {}).get("AutoModelForCausalLM")
    built_in = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields.get("model_type"), "")
    # The case differs in MPTForCausalLM and MptForCausalLM.
    if named and named.rpartition(".")[2].lower() != built_in.lower():
        raise UserError(
            f"{source} needs remote code ({named}), which is refused: only models whose code is "
            "in transformers are loaded"
        )


def validate_causal_decoder(source: str, config: PreTrainedConfig) -> None:
    """Check that a configuration belongs to a causal decoder of text alone.

    Raises:
        UserError: naming the class of the model.
    """
    kind = config.model_type
    (named, *_) = config.architectures or [kind]
    is_encoded = getattr(config, "is_encoder_decoder", False)
    sees = kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or hasattr(
        config, "vision_config"
    )
    known = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if sees or is_encoded or not is_decoder_class(named) or not known:
        raise UserError(f"{source} is a {named}, not a causal decoder of text")


_WINDOWS = ("attention_window_size", "sliding_window", "window_size", "attention_chunk_size")


def validate_windows(source: str, config: PreTrainedConfig) -> None:
    """Check that a window or a chunk of attention, if any layer has one, holds a token.

    Raises:
        UserError: naming the setting and what to write in its place.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is not None and {*kinds} <= {"full_attention", "linear_attention", "global"}:
        return
    for name in _WINDOWS:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise UserError(
                f"{source} has {name} {size} in its configuration, and a window of no tokens hides "
                "every key: write its size, or null if there is no window"
            )


def _keep_first_layers(source: str, config: PreTrainedConfig, n_layers: int) -> None:
    depth = config.num_hidden_layers
    if n_layers > depth:
        raise TooFewLayersError(source, depth=depth, requested=n_layers)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:n_layers])
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:  # the last layers, which attend to the keys of layers before
        config.num_kv_shared_layers = max(0, shared - (depth - n_layers))
    config.depth_in_files = depth
    config.num_hidden_layers = n_layers


def _without_rope(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a SmolLM3 without RoPE whose weights are a Llama's."""
    settings = config.to_dict() | {"no_rope_layers": [0] * config.num_hidden_layers}
    for name in ("model_type", "architectures"):
        settings.pop(name)
    return SmolLM3Config(**settings)
