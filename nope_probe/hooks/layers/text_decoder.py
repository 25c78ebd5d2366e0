"""The text decoder of a multimodal model: its configuration, its class, its modules, its logits.

The text decoder of a Qwen2.5-VL is a Qwen2, and that of a Qwen3-VL a Qwen3: the three position ids
of a token of text are equal, so that their RoPE is RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING as MULTIMODAL

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import relative_error, score_tolerance
from nope_probe.hooks.layers.parity import (
    Reference,
    probe_tokens,
    probed,
    validate_functions,
)

# The decoders of text whose weights these have, where transformers has no class for text alone.
_SAME_WEIGHTS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_OTHERWISE = ("paligemma", "pi0")  # run their decoder without a mask, on scaled embeddings
_OF_LOGITS = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
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
    """Return transformers' class of a decoder, or of a multimodal model.

    Raises:
        UserError: for a multimodal model for which transformers has no class.
    """
    if text_config_of(config) is config:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    (named, *_) = config.architectures or [""]
    kind = getattr(transformers, named, None) or MULTIMODAL.get(type(config))
    if getattr(kind, "config_class", None) is not type(config):
        raise UserError(f"transformers has no class {named} of the type {config.model_type}")
    return kind


def is_decoder_class(name: str) -> bool:
    """Return whether a class of transformers, by its name, is that of a decoder."""
    return "CausalLM" in name or "LMHead" in name


def text_part(model: PreTrainedModel) -> tuple[str, ...]:
    """Return how the names of the tensors of a model's text decoder begin."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    return tuple(f"{name}." for name, module in model.named_modules() if module in parts)


def with_reference(
    model: PreTrainedModel, copied: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, Reference]:
    """Return the decoder of text in a model, or in its copy, and the model's outputs on the probe.

    The decoder has eager attention, and the model's logits. Attention weights are those of a model
    with eager attention.
    """
    is_eager = model.config.get_text_config()._attn_implementation == "eager"
    whole = model if copied is None else copied
    config = text_config_of(whole.config)
    decoder = whole if config is whole.config else _within(whole, class_of(config), config)
    decoder.eval().set_attn_implementation("eager")
    validate_functions(model)
    reference = probed(model, with_patterns=is_eager and decoder is model)
    if is_eager and decoder is not model:
        patterns = probed(decoder, with_patterns=True).patterns
        reference = replace(reference, patterns=patterns)
    return decoder if decoder is whole else _with_logits(decoder, reference.logits), reference


def _within(
    model: PreTrainedModel, kind: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    """Return the decoder of text in a multimodal model, of the same modules."""
    from accelerate import init_empty_weights

    backbone: Any = model.get_decoder()
    if isinstance(backbone, kind):  # as of Llama 4
        return backbone
    with init_empty_weights():
        decoder = kind(config)
    name, empty = decoder.base_model_prefix, decoder.base_model
    if type(empty) is type(backbone):
        setattr(decoder, name, backbone)
    for path, module in [*decoder.base_model.named_modules()]:
        if module is not backbone and decoder.base_model is empty and module._parameters:
            empty.set_submodule(path, backbone.get_submodule(path))
    decoder.set_output_embeddings(model.get_output_embeddings())
    return decoder


def _with_logits(
    decoder: PreTrainedModel, logits: Float[Tensor, "seq pos d_vocab"]
) -> PreTrainedModel:
    """Return a decoder that does nothing to the head's outputs, if its logits are others.

    Cohere's and Granite's classes scale the logits and Gemma 2's caps them; most multimodal models
    of these decoders do neither.
    """
    with torch.inference_mode():
        of_class = decoder(probe_tokens(decoder.config.vocab_size).to(decoder.device)).logits
    if relative_error(of_class.float(), logits) > score_tolerance(of_class.dtype):
        for name, neutral in _OF_LOGITS.items():
            for place in (decoder, decoder.config):
                if hasattr(place, name):
                    setattr(place, name, neutral)
    return decoder
