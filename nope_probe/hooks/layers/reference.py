"""Plain transformers: the decoder of text in a model, and what a hooked model must compute.

The text decoder of a multimodal model has a configuration, a class and modules of its own. That of
a Qwen2.5-VL is a Qwen2, and that of a Qwen3-VL a Qwen3: the three position ids of a token of text
are equal, so that their RoPE is RoPE.

The outputs of plain transformers on a small probe are the reference. A hooked model is compared
with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING as MULTIMODAL

from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.layers.attention import Attention, relative_error, score_tolerance
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.passes import attention_read, evaluated, logits_of

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
    text.text_decoder_of = (config.architectures or [config.model_type])[0]
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


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The outputs of plain transformers on the probe.

    Attributes:
        logits: the logits.
        patterns: the attention weights of each layer that returns them.
    """

    logits: Float[Tensor, "seq pos d_vocab"]
    patterns: tuple[Tensor, ...]


def probe_tokens(d_vocab: int) -> Int[Tensor, "seq pos"]:
    """Return the small batch of random tokens on which parity is measured."""
    return torch.randint(d_vocab, (2, 13), generator=torch.Generator().manual_seed(0))


def probed(model: Any, *, with_patterns: bool = False) -> Reference:
    """Return the outputs of a plain model on the probe, without a trace in the model.

    Args:
        model: a model of transformers.
        with_patterns: whether eager attention returns its weights too. It hands masks of its own
            kind to a user's hooks.

    Raises:
        UserError: for a model that does not run on text alone, or whose outputs are NaN, naming a
            weight that is not finite, if one is.
    """
    tokens = probe_tokens(model.config.get_text_config().vocab_size).to(model.device)
    eager = torch.compiler.set_stance("force_eager")  # compiling takes longer than the pass
    size = f"{len(tokens)} sequences of {tokens.shape[1]} tokens"
    alone = reading(f"a {type(model).__name__} does not run on {size} of text alone")
    options = {"output_attentions": True} if with_patterns else {}
    with alone, torch.no_grad(), evaluated(model), eager:
        outputs = model(input_ids=tokens, use_cache=False, **options)
    logits = outputs.logits.float()
    if logits.isnan().any():
        validate_weights(model)
        raise UserError(
            f"the model's outputs are NaN in {str(model.dtype).removeprefix('torch.')}, with "
            "finite weights: load it in another dtype (dtype=torch.float32)"
        )
    # A state-space model has no attention weights.
    attentions = (getattr(outputs, "attentions", None) if with_patterns else None) or ()
    patterns = tuple(attention for attention in attentions if attention is not None)
    return Reference(logits=logits, patterns=patterns)


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
    else:
        for path in [path for path, module in empty.named_modules() if module._parameters]:
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


def validate_weights(model: nn.Module) -> None:
    """Check that the weights of a model are numbers.

    Raises:
        UserError: naming a weight that holds NaN or infinite numbers.
    """
    for name, weight in model.named_parameters():
        numbers = weight.detach()
        # A sum is much faster than a test of each number, and makes no tensor of the weight's size.
        is_finite = not numbers.is_floating_point() or numbers.sum().isfinite()
        if not is_finite and not numbers.isfinite().all():
            raise UserError(f"the weight {name} holds NaN or infinite numbers: the model is broken")


def validate_surroundings() -> None:
    """Check that no context around a call changes what models compute.

    Raises:
        UserError: naming the context.
    """
    if torch.get_default_device().type == "meta":
        raise UserError(
            "inside torch.device('meta') tensors have no numbers: call nope_probe outside of it"
        )
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if kinds:
        raise UserError(
            f"inside torch.autocast ({kinds[0]}) products are rounded to another dtype: call "
            "nope_probe outside of it, and load the model in that dtype (dtype=torch.bfloat16)"
        )


def validate_functions(model: Any) -> None:
    """Check that attention and masks, which taps and masks of ours replace, are transformers'.

    The probe is a few tokens long, so that it would not see a window.

    Raises:
        UserError: naming the function that is the user's.
    """
    name = model.config.get_text_config()._attn_implementation
    for kind, functions in (
        ("attention", ALL_ATTENTION_FUNCTIONS),
        ("mask", ALL_MASK_ATTENTION_FUNCTIONS),
    ):
        function = functions.get(name)
        if function is not None and not is_of_a_library(function):
            raise UserError(
                f"the {kind} function {name!r} is {_home_of(function)}'s, and would be dropped: "
                "set_attn_implementation('eager') and change it in a subclass or by a hook"
            )


# Whose functions on a module, or in place of another, compute the same.
_CHECKERS = ("jaxtyping", "beartype")
_LIBRARIES = ("transformers", "torch", "nnsight", "nope_probe", "transformer_lens")


def is_of_a_library(function: Any) -> bool:
    """Return whether a function, whatever it wraps, is one of the libraries that models need."""
    return _home_of(function).split(".")[0] in _LIBRARIES


def _home_of(function: Any) -> str:
    """Return the module in which a function is written, whatever it wraps."""
    function = getattr(function, "func", function)  # of a partial
    function = getattr(function, "__func__", function)  # of a method
    names = getattr(function, "__globals__", None)
    home = str(names["__name__"] if names else getattr(function, "__module__", None) or "torch")
    # What checks types computes what it wraps.
    return _home_of(function.__wrapped__) if home.split(".")[0] in _CHECKERS else home


_REASONS = {
    "logits": (
        "TransformerLens and transformers compute different outputs (a function of transformers "
        "that was replaced is dropped: change a model by a subclass, or by hooks)"
    ),
    "positions": "scores depend on positions otherwise than by RoPE or learned embeddings",
}


def validate_within(
    name: str, errors: Mapping[str, float], dtype: torch.dtype, layer: int | None = None
) -> None:
    """Check that the errors of a model are within the tolerance of its dtype.

    Args:
        name: the model's name.
        errors: by output.
        dtype: the model's.
        layer: the first layer whose attention is off, if it is known.

    Raises:
        UserError: naming the output that is off, its error, and the layer.
    """
    tolerance, since = score_tolerance(dtype), "" if layer is None else f", from L{layer} on"
    for output, value in errors.items():
        if not value <= tolerance:
            raise UserError(
                f"{name} fails parity: {output} off by {value:.2g} (relative), more than "
                f"{tolerance:g}{since}; {_REASONS.get(output, _REASONS['logits'])}"
            )


def errors_of(model: HookedModel, reference: Reference) -> dict[str, float]:
    """Return the relative errors of logits and attention weights against plain transformers.

    Raises:
        UserError: for an error beyond the tolerance, naming the first layer that is off where
            transformers returned attention weights.
    """

    def pattern(layer: Layer, attention: Attention) -> tuple[int, Tensor]:
        return layer.index, attention.pattern().float()

    with torch.inference_mode(), attention_read(model, pattern) as patterns:
        logits = logits_of(model, probe_tokens(model.cfg.d_vocab)).float()
    errors, layer = {"logits": relative_error(logits, reference.logits.to(logits.device))}, None
    dtype = next(model.parameters()).dtype
    if len(patterns) == len(reference.patterns):
        of_layers = {
            index: relative_error(pattern, expected.float().to(pattern.device))
            for (index, pattern), expected in zip(patterns, reference.patterns, strict=True)
        }
        # Python's max skips NaN.
        errors["pattern"] = float(torch.tensor([*of_layers.values()]).max())
        within = score_tolerance(dtype)
        layer = next((index for index in of_layers if not of_layers[index] <= within), None)
    validate_within(str(getattr(model.cfg, "model_name", "")), errors, dtype, layer)
    return errors
