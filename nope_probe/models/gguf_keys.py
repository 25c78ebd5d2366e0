"""The keys of a GGUF file that decide sizes, positions and norms, as fields of a configuration.

transformers sets some fields of a configuration from a file's keys, and leaves the other keys out
without a word, such as the base of RoPE or a window. Here all keys are compared with the
configuration that transformers builds. A field that differs is set. A key that the configuration
cannot hold is refused by name.
"""

from __future__ import annotations

from copy import deepcopy
from math import nextafter
from typing import Any

from transformers import AutoConfig

from nope_probe.errors import UserError
from nope_probe.files import JsonObject

FileKeys = JsonObject  # without the name of the architecture, such as `rope.freq_base`
Fields = JsonObject

_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
# Fields that may hold a key; of each architecture's configuration, the first that it has. A size
# without a field needs none: the shapes of the tensors show whether the configuration has it.
SIZES: dict[str, tuple[str, ...]] = {
    "attention.key_length": ("global_head_dim", "head_dim"),
    "attention.key_length_swa": ("head_dim",),
    "context_length": ("n_positions", "max_position_embeddings"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "feed_forward_length": ("n_inner", "ffn_hidden_size"),
}
FIELDS: dict[str, tuple[str, ...]] = {
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attention.sliding_window_pattern": ("layer_types",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
# Keys that `rope_parameters` holds.
ROPE = (
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
# Keys that transformers reads, or that the shapes of the tensors show.
_READ = (
    *("attention.head_count", "attention.head_count_kv", "attention.value_length"),
    *("attention.value_length_swa", "rope.dimension_sections", "rope.scaling.finetuned"),
)
_FACTORS = ("embedding_scale", "logit_scale", "residual_scale")
# Values with which a key that no configuration holds changes nothing; by default 0.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (0, 1),
    **dict.fromkeys(_FACTORS, (0, 1)),
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def complete_fields(source: str, keys: FileKeys, fields: Fields) -> Fields:
    """Return the fields of a configuration, with all that a file's keys say.

    Args:
        source: the file, for errors.
        keys: its keys.
        fields: the fields that transformers makes of the keys.

    Raises:
        UserError: naming a key that the configuration cannot hold.
    """
    validate_known(source, keys)
    built = _built(fields)
    fields = fields | {
        field: keys[key] for key in SIZES if key in keys and (field := _field_of(key, built))
    }
    built = _built(fields)
    wanted = {key: (_field_of(key, built), _value(key, keys[key])) for key in FIELDS if key in keys}
    rope = rope_parameters(source, built, keys)
    if rope is not None:
        wanted["rope.freq_base"] = ("rope_parameters", rope)
    fields |= {field: value for field, value in wanted.values() if field} | _implied(built)
    built = _built(fields)
    for key, (field, value) in wanted.items():
        if (built.get(field or "") or None) != value:
            raise _not_read(source, key, keys.get(key))
    return fields


def validate_known(source: str, keys: FileKeys) -> None:
    """Check that each key of positions, norms and factors is one that a configuration can hold.

    Raises:
        UserError: naming a key that none holds.
    """
    for key, value in keys.items():
        decides = key.startswith(("attention.", "rope.")) or key in _FACTORS
        if not decides or key in (*SIZES, *FIELDS, *ROPE, *_READ):
            continue
        if value not in _NEUTRAL.get(key, (0,)):
            raise _not_read(source, key, value)


def rope_parameters(source: str, built: Fields, keys: FileKeys) -> Fields | None:
    """Return a configuration's parameters of RoPE, as a file's keys have them; None without keys.

    Where layers with a window have another RoPE, as in Gemma 3, scaling is of the other layers.

    Raises:
        UserError: naming a key that the parameters cannot hold.
    """
    stated = [key for key in ROPE if key in keys and key != "rope.scaling.original_context_length"]
    before = built.get("rope_parameters")
    if not stated:
        return None
    if before is None:
        raise _not_read(source, stated[0], keys[stated[0]])
    by_kind = "full_attention" in before
    rope = dict(before["full_attention"] if by_kind else before)
    base = keys.get("rope.freq_base", rope["rope_theta"])
    windowed = keys.get("rope.freq_base_swa", base)
    rope["rope_theta"] = base
    rope |= _rotated_part(source, built, rope, keys) | _scaling(source, keys)
    if by_kind:
        of_windows = dict(before["sliding_attention"])
        of_windows["rope_theta"] = keys.get("rope.freq_base_swa", of_windows["rope_theta"])
        return before | {"full_attention": rope, "sliding_attention": of_windows}
    if windowed != base:
        raise _not_read(source, "rope.freq_base_swa", windowed)
    return rope


def _rotated_part(source: str, built: Fields, rope: Fields, keys: FileKeys) -> Fields:
    """Return the part of a head's coordinates that RoPE turns, where it is not as before."""
    d_head = built.get("global_head_dim") or built.get("head_dim") or _width(built)
    before = int(d_head * rope.get("partial_rotary_factor", 1))
    n_turned = keys.get("rope.dimension_count", before)
    if n_turned == before:
        return {}
    if "partial_rotary_factor" not in rope:  # the model turns whole heads
        raise _not_read(source, "rope.dimension_count", n_turned)
    part = n_turned / d_head
    return {"partial_rotary_factor": part if int(d_head * part) == n_turned else nextafter(part, 2)}


def _scaling(source: str, keys: FileKeys) -> Fields:
    """Return the parameters of RoPE's scaling; none for a file without scaling."""
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    kind = keys.get("rope.scaling.type", "linear")
    context = keys.get("rope.scaling.original_context_length")
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or factor == 1 or context is None:
        raise _not_read(source, "rope.scaling.type", kind)
    betas = {
        name: keys[f"rope.scaling.yarn_{name}"]
        for name in ("beta_fast", "beta_slow")
        if f"rope.scaling.yarn_{name}" in keys
    }
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    return scaling | betas


def _implied(built: Fields) -> Fields:
    """Return the fields for which an architecture has no key, as llama.cpp runs it."""
    kind = built["model_type"]
    if kind not in _LAYERS_OF_27B:
        return {}
    is_27b = built["num_hidden_layers"] == _LAYERS_OF_27B[kind]
    return {"query_pre_attn_scalar": _width(built) if is_27b else built["head_dim"]}


def _width(built: Fields) -> int:
    return built["hidden_size"] // built["num_attention_heads"]


def _value(key: str, value: Any) -> Any:
    """Return a key's value as a configuration holds it."""
    if key == "attention.sliding_window_pattern" and isinstance(value, list):
        return ["sliding_attention" if windowed else "full_attention" for windowed in value]
    return value or None  # a window or a cap of 0 is none


def _field_of(key: str, built: Fields) -> str | None:
    """Return the first of a key's fields that a configuration has."""
    return next((name for name in (SIZES | FIELDS)[key] if name in built), None)


def _built(fields: Fields) -> Fields:
    """Return all fields of the configuration that transformers builds of some."""
    return AutoConfig.for_model(**deepcopy(fields)).to_dict()


def _not_read(source: str, key: str, value: Any) -> UserError:
    return UserError(
        f"{source} states {key} = {value}, which transformers does not read from GGUF: take the "
        "model's folder or Hub id with safetensors"
    )
