"""A Hugging Face model's configuration: that of a causal decoder, cut to its first layers.

Other kinds of models and remote code are refused by what it says, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nope_probe.errors import TooFewLayersError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# The paper's own checkpoint and TinyLlama's twin say Llama, and were trained without RoPE.
WITHOUT_ROPE = ("starmpcc/nope_1.5b_fw_edu_15t", "antnlp/tinyllama-nope-1.1b")


def read_config(
    source: str, *, n_layers: int | None = None, revision: str | None = None
) -> PreTrainedConfig:
    """Read a causal decoder's configuration, of the first layers only if asked.

    A Llama that was trained without RoPE becomes the SmolLM3 without RoPE that has its weights.

    Raises:
        UserError: for remote code, or for what is no causal decoder.
        TooFewLayersError: if more layers are asked for than there are.
    """
    from transformers import AutoConfig, PreTrainedConfig

    without_rope = source.lower() in WITHOUT_ROPE
    said, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    if not without_rope:
        validate_remote_model(source, said)
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    _validate_other_kinds(source, config)
    _cut(source, config, n_layers)
    return _without_rope(config) if without_rope else config


def validate_remote_model(source: str, said: Mapping[str, Any]) -> None:
    """Refuse a model whose configuration or class is code in its own folder.

    A folder may bring code for a model that transformers knows too (Phi-3 does); transformers' own
    class is taken then, if it is of the same name.

    Raises:
        UserError: naming the class that would have to be run.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    brought, kind = said.get("auto_map") or {}, said.get("model_type")
    if not isinstance(brought, Mapping):
        raise UserError(f"{source} has a config.json whose auto_map is no table")
    model = brought.get("AutoModelForCausalLM") or brought.get("AutoModel")
    if brought and kind not in CONFIG_MAPPING_NAMES:
        raise remote_code(source, brought.get("AutoConfig") or model or kind)
    if model and class_name(model) != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind):
        raise remote_code(source, model)


def class_name(reference: str) -> str:
    """Give the class that an entry of `auto_map` names.

    Example:
        >>> class_name("owner/model--modeling_own.OwnForCausalLM")
        'OwnForCausalLM'
    """
    return reference.rpartition("--")[2].rpartition(".")[2]


def remote_code(source: str, reference: object) -> UserError:
    """Say that a class of a model's own folder would have to be run."""
    return UserError(
        f"{source} needs remote code ({reference}), which is refused: only models whose code is "
        "in transformers are loaded"
    )


def _validate_other_kinds(source: str, config: PreTrainedConfig) -> None:
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    named = (config.architectures or [kind])[0]
    if kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or hasattr(config, "vision_config"):
        what = f"is a vision-language model ({named})"
    elif getattr(config, "is_encoder_decoder", False):
        what = f"is an encoder-decoder ({named})"
    elif named != kind and not _says_decoder(config.architectures):
        encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        what = f"is an encoder ({named})" if encoder else f"holds a {named}"
    elif kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what = f"is a {kind} model"
    else:
        return
    raise UserError(f"{source} {what}, not a causal decoder")


def _says_decoder(names: Iterable[str]) -> bool:
    return any("CausalLM" in name or "LMHead" in name for name in names)


def _cut(source: str, config: PreTrainedConfig, n_layers: int | None) -> None:
    depth = config.num_hidden_layers
    if n_layers is None:
        return
    if n_layers < 1:
        raise UserError(f"expected at least 1 layer, got {n_layers}")
    if n_layers > depth:
        raise TooFewLayersError(source, depth=depth, requested=n_layers)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:n_layers])
    config.num_hidden_layers = n_layers


def _without_rope(config: PreTrainedConfig) -> PreTrainedConfig:
    """Turn a Llama's configuration into that of a SmolLM3 without RoPE, whose weights are alike."""
    from transformers import SmolLM3Config

    settings = config.to_dict() | {"no_rope_layers": [0] * config.num_hidden_layers}
    for name in ("model_type", "architectures"):
        settings.pop(name)
    return SmolLM3Config(**settings)
