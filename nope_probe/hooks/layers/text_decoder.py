"""The text decoder of a multimodal model: its configuration, its class, its modules.

The text decoder of a Qwen2.5-VL is a Qwen2, and that of a Qwen3-VL a Qwen3: the three position ids
of a token of text are equal, so that their RoPE is RoPE.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

# The decoders of text whose weights these have, where transformers has no class for text alone.
_SAME_WEIGHTS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_OTHERWISE = ("paligemma", "pi0")  # run their decoder without a mask, on scaled embeddings
_TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(lm_head\.)?")
_OTHER = re.compile(r"^(?:model\.)?\w*(?:vis(?:ion|ual)|image|audio|proj|connector|aligner)\w*\.")
_NAMES = ("model_type", "architectures", "transformers_version")
OF = "text_decoder_of"  # the field of a configuration that names the class of the whole model


def context_in(text: PreTrainedConfig) -> int | None:
    """Return how many positions a model of this configuration takes; None if it does not say."""
    names = ("max_position_embeddings", "max_seq_len")  # the second is MPT's
    return next((getattr(text, name) for name in names if getattr(text, name, None)), None)


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the decoder of text in a multimodal model; else the given one.

    The given one also comes back where transformers has no class for the decoder.
    """
    text: Any = getattr(config, "text_config", None)
    same = _SAME_WEIGHTS.get(getattr(text, "model_type", ""))
    is_known = same is not None or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    if config.model_type in _OTHERWISE or not is_known:
        return config
    if same is not None:
        fields = {"norm_topk_prob": True, **text.to_dict()}  # as the experts of Qwen3-VL always do
        text = CONFIG_MAPPING[same](**{name: fields[name] for name in fields if name not in _NAMES})
    text.architectures = [class_of(text).__name__]
    setattr(text, OF, (config.architectures or [config.model_type])[0])
    return text


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of a decoder."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def text_key(key: str) -> str | None:
    """Return the name in the decoder of text of a multimodal checkpoint's tensor, or None.

    Example:
        >>> text_key("language_model.model.norm.weight"), text_key("lm_head.weight")
        ('model.norm.weight', 'lm_head.weight')
        >>> text_key("model.vision_tower.norm.weight")
    """
    if _OTHER.match(key):
        return None
    return _TEXT.sub(lambda match: match[1] or "model.", key)


def text_decoder(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the decoder of text in a multimodal model, of the same modules.

    Args:
        model: the multimodal model, whose modules the decoder takes.
        config: the configuration of the decoder.
    """
    from accelerate import init_empty_weights

    backbone: Any = model.get_decoder()
    if isinstance(backbone, class_of(config)):  # of Llama 4
        return backbone
    with init_empty_weights():
        decoder: Any = class_of(config)(config)
    name, empty = decoder.base_model_prefix, decoder.base_model
    if type(empty) is type(backbone):
        setattr(decoder, name, backbone)
    for path, module in [*decoder.base_model.named_modules()]:
        if module is not backbone and decoder.base_model is empty and module._parameters:
            empty.set_submodule(path, backbone.get_submodule(path))
    decoder.set_output_embeddings(model.get_output_embeddings())
    return decoder.eval()
