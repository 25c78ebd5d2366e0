"""Read a Hugging Face model's configuration, of its first layers only if asked.

Models that are no causal decoders, and models that need remote code, are refused here, before any
weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.errors import TooFewLayersError, UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

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
    if not isinstance(fields, Mapping):
        raise UserError(f"{source} has a config.json that is no JSON object")
    validate_depth(source, fields)
    if not without_rope:
        validate_no_remote_code(source, fields)
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    validate_causal_decoder(source, config)
    validate_counts(source, config)
    validate_architecture(source, config)
    if n_layers is not None:
        _keep_first_layers(source, config, n_layers)
    return _without_rope(config) if without_rope else config


def validate_no_remote_code(source: str, fields: Mapping[str, Any]) -> None:
    """Check that a model's classes are in transformers, not in its own folder.

    A folder may hold code for a model that transformers has too (Phi-3 does); transformers' own
    class is used then, if it has the same name.

    Args:
        source: a Hub id or a local folder.
        fields: its config.json.

    Raises:
        UserError: naming the class that would have to be run.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    auto_map, kind = fields.get("auto_map") or {}, fields.get("model_type")
    if not isinstance(auto_map, Mapping):
        raise UserError(f"{source} has a config.json whose auto_map is no JSON object")
    model = auto_map.get("AutoModelForCausalLM") or auto_map.get("AutoModel")
    if auto_map and kind not in CONFIG_MAPPING_NAMES:
        raise remote_code_error(source, auto_map.get("AutoConfig") or model or kind)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")
    if model and class_name(str(model)).lower() != known.lower():  # MPTForCausalLM, MptForCausalLM
        raise remote_code_error(source, model)


def class_name(reference: str) -> str:
    """Return the class that an entry of `auto_map` names.

    Example:
        >>> class_name("owner/model--modeling_own.OwnForCausalLM")
        'OwnForCausalLM'
    """
    return reference.rpartition("--")[2].rpartition(".")[2]


def remote_code_error(source: str, reference: object) -> UserError:
    """Return the error for a class that is in a model's own folder."""
    return UserError(
        f"{source} needs remote code ({reference}), which is refused: only models whose code is "
        "in transformers are loaded"
    )


def validate_causal_decoder(source: str, config: PreTrainedConfig) -> None:
    """Check that a configuration is that of a causal decoder.

    Raises:
        UserError: saying what the model is instead.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    named = (config.architectures or [kind])[0]
    if kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or hasattr(config, "vision_config"):
        what = f"is a vision-language model ({named})"
    elif getattr(config, "is_encoder_decoder", False):
        what = f"is an encoder-decoder ({named})"
    elif named != kind and not _is_decoder_class(map(str, config.architectures)):
        encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        what = f"is an encoder ({named})" if encoder else f"holds a {named}"
    elif kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what = f"is a {kind} model"
    else:
        return
    raise UserError(f"{source} {what}, not a causal decoder")


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
        decoders = [name for name in SUPPORTED_ARCHITECTURES if _is_decoder_class([name])]
        near = get_close_matches(named, decoders, n=3, cutoff=0.3)
        raise UserError(
            f"{source} is a {named}, which TransformerLens does not read; the nearest "
            f"architectures that it reads are {', '.join(near)}"
        ) from error


def _is_decoder_class(names: Iterable[str]) -> bool:
    return any("CausalLM" in name or "LMHead" in name for name in names)


def _keep_first_layers(source: str, config: PreTrainedConfig, n_layers: int) -> None:
    depth = config.num_hidden_layers
    if n_layers < 1:
        raise UserError(f"expected at least 1 layer, got {n_layers}")
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


# A configuration lists something for each layer as soon as it is made.
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
MOST_LAYERS = 10_000
# Up to so many numbers beyond those on disk a model is built, and its wrong weights are named.
SPARE_NUMBERS = 100_000_000


def validate_depth(source: str, fields: Mapping[str, Any]) -> None:
    """Check that the numbers of layers in a config.json can be those of a model.

    Raises:
        UserError: naming the field.
    """
    for name, value in _nested(fields):
        if name in _DEPTHS and isinstance(value, int) and not 1 <= value <= MOST_LAYERS:
            raise UserError(
                f"{source} has a config.json with {name} {value}: expected 1 to {MOST_LAYERS}"
            )


def _nested(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the fields of an object and of the objects in it, such as a `text_config`."""
    for name, value in fields.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _nested(value)


def validate_counts(source: str, config: PreTrainedConfig) -> None:
    """Check that a configuration's counts are positive and its heads divide what they share.

    Raises:
        UserError: naming the field.
    """
    fields = config.to_dict()
    counts = {name: fields.get(config.attribute_map.get(name, name)) for name in _COUNTS}
    for name, value in counts.items():
        if isinstance(value, int) and value < 1:
            raise UserError(
                f"{source} has a config.json with {name} {value}: expected a positive number"
            )
    heads, key_heads = counts["num_attention_heads"], counts["num_key_value_heads"]
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        raise UserError(
            f"{source} has a config.json with {heads} attention heads, which cannot share "
            f"{key_heads} key-value heads"
        )


def count_numbers(kind: type[PreTrainedModel], config: PreTrainedConfig) -> int:
    """Return how many numbers a configuration's model holds, from its shapes alone."""
    import torch

    with torch.device("meta"):
        model = kind._from_config(deepcopy(config), attn_implementation="eager")
    return sum(each.numel() for each in (*model.parameters(), *model.buffers()))


def validate_fits(source: str, n_numbers: int, weights: Mapping[str, Tensor]) -> None:
    """Check that a model is not far larger than its weights on disk.

    Args:
        source: a Hub id or a local folder.
        n_numbers: how many numbers its configuration asks for.
        weights: its tensors.

    Raises:
        UserError: with both sizes.
    """
    stored = sum(tensor.numel() for tensor in weights.values())
    if n_numbers > 4 * stored + SPARE_NUMBERS:
        raise UserError(
            f"{source} has a config.json of a model of {n_numbers:.3g} numbers, and its weights "
            f"hold {stored:.3g}"
        )
