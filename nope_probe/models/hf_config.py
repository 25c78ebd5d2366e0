"""Read a Hugging Face model's configuration, of its first layers only if asked.

Models that are no causal decoders, and models that need remote code, are refused here, before any
weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.errors import TooFewLayersError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The paper's own checkpoint and TinyLlama-NoPE are of type Llama, and were trained without RoPE.
WITHOUT_ROPE = ("starmpcc/nope_1.5b_fw_edu_15t", "antnlp/tinyllama-nope-1.1b")


def read_config(
    source: str, *, n_layers: int | None = None, revision: str | None = None
) -> PreTrainedConfig:
    """Read a causal decoder's configuration, of the first layers only if asked.

    The configuration of a Llama that was trained without RoPE is returned as that of a SmolLM3
    without RoPE, which has the same weights.

    Raises:
        UserError: for a model that needs remote code, or that is no causal decoder.
        TooFewLayersError: if more layers are asked for than there are.
    """
    from transformers import AutoConfig, PreTrainedConfig

    without_rope = "/".join(Path(source).parts[-2:]).lower() in WITHOUT_ROPE
    fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    if not without_rope:
        validate_no_remote_code(source, fields)
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    validate_causal_decoder(source, config)
    if n_layers is not None:
        _keep_first_layers(source, config, n_layers)
    return _without_rope(config) if without_rope else config


def validate_no_remote_code(source: str, fields: Mapping[str, Any]) -> None:
    """Check that a model's class is in transformers, not in its own folder.

    A folder may hold code for a model that transformers has too (Phi-3 does); transformers' own
    class is used then, if it has the same name.

    Args:
        source: a Hub id or a local folder.
        fields: its config.json.

    Raises:
        UserError: naming the class that would have to be run.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = (fields.get("auto_map") or {}).get("AutoModelForCausalLM")
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields.get("model_type"), "")
    if named and named.rpartition(".")[2].lower() != own.lower():  # MPTForCausalLM, MptForCausalLM
        raise UserError(
            f"{source} needs remote code ({named}), which is refused: only models whose code is "
            "in transformers are loaded"
        )


def validate_causal_decoder(source: str, config: PreTrainedConfig) -> None:
    """Check that a configuration is that of a causal decoder, and of text alone.

    Raises:
        UserError: naming the class of the model.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    (named, *_) = config.architectures or ["CausalLM"]
    is_encoded = getattr(config, "is_encoder_decoder", False)
    sees = kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or hasattr(
        config, "vision_config"
    )
    known = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if sees or is_encoded or not _is_decoder_class(named) or not known:
        what = kind if named == "CausalLM" else named
        raise UserError(f"{source} is a {what}, not a causal decoder of text")


def validate_architecture(source: str, config: PreTrainedConfig) -> None:
    """Check that TransformerLens reads a decoder's architecture.

    Raises:
        UserError: with the nearest architectures that it reads.
    """
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.model_bridge.sources.transformers import (
        determine_architecture_from_hf_config,
    )

    try:
        determine_architecture_from_hf_config(config)
    except ValueError as error:
        named = (config.architectures or [config.model_type])[0]
        decoders = [name for name in SUPPORTED_ARCHITECTURES if _is_decoder_class(name)]
        near = get_close_matches(named, decoders, n=3, cutoff=0.3)
        raise UserError(
            f"{source} is a {named}, which TransformerLens does not read; the nearest "
            f"architectures that it reads are {', '.join(near)}"
        ) from error


def _is_decoder_class(name: str) -> bool:
    return "CausalLM" in name or "LMHead" in name


def _keep_first_layers(source: str, config: PreTrainedConfig, n_layers: int) -> None:
    depth = config.num_hidden_layers
    if n_layers > depth:
        raise TooFewLayersError(source, depth=depth, requested=n_layers)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:n_layers])
    config.num_hidden_layers = n_layers


def _without_rope(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a SmolLM3 without RoPE whose weights are a Llama's."""
    from transformers import SmolLM3Config

    settings = config.to_dict() | {"no_rope_layers": [0] * config.num_hidden_layers}
    for name in ("model_type", "architectures"):
        settings.pop(name)
    return SmolLM3Config(**settings)
