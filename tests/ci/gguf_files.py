"""GGUF files of tiny models, written with llama.cpp's own writer from a model in memory.

A tensor is stored as llama.cpp's converter stores it, and a key has the name that the converter
gives it. Neither comes from transformers' reader.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from support.tiny_models import CONFIGS, randomised, tokenizer
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

Tensors = Iterator[tuple[str, torch.Tensor]]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    architecture: str = "llama",
    name: str = "a training run",
    adds_bos: bool = False,
    quantised: bool = False,
    has_tokenizer: bool = True,
    more: dict[str, torch.Tensor] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model and the tiny tokenizer to a GGUF file, in float32 or Q8_0.

    Args:
        path: the file.
        model: the model.
        architecture: the architecture that the file states.
        name: the name that the file states.
        adds_bos: whether the file's tokenizer adds BOS.
        quantised: whether matrices of rows of 32 numbers become Q8_0.
        has_tokenizer: whether the file has a tokenizer.
        more: further tensors, by their names in the file or in a Llama.
        keys: further keys of the model, or other values; None leaves a key out.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if quantised else LlamaFileType.ALL_F32)
    for key, value in (keys_of(model.config) | dict(keys or {})).items():
        if value is not None:
            _add_key(writer, f"{architecture}.{key}", value)
    if has_tokenizer:
        _add_tokenizer(writer, adds_bos)
    for given, tensor in (model.state_dict() | (more or {})).items():
        for stored, part in _stored(given, tensor.contiguous(), architecture, model.config):
            numbers: Any = part.contiguous().numpy()
            kind = GGMLQuantizationType.F32
            if quantised and part.ndim == 2 and part.shape[1] % 32 == 0:
                kind = GGMLQuantizationType.Q8_0
                numbers = quantize(numbers, kind)
            writer.add_tensor(stored, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(hidden_size: int = 42) -> LlamaForCausalLM:
    """Return a random Llama without the biases that transformers drops."""
    config = CONFIGS["llama"]()
    config.attention_bias, config.mlp_bias, config.hidden_size = False, False, hidden_size
    return randomised(config, seed=1)


def keys_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys that llama.cpp's converter writes for a configuration."""
    built = config.to_dict()
    built |= {name: built[given] for name, given in config.attribute_map.items() if given in built}
    d_head = built.get("global_head_dim") or built.get("head_dim")
    d_head = d_head or built["hidden_size"] // built["num_attention_heads"]
    of_fields = {
        "block_count": ("num_hidden_layers",),
        "context_length": ("n_positions", "max_position_embeddings"),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("n_inner", "ffn_hidden_size", "intermediate_size"),
        "attention.head_count": ("num_attention_heads",),
        "attention.head_count_kv": ("num_key_value_heads",),
        "attention.sliding_window": ("sliding_window",),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
        "attention.layer_norm_epsilon": (
            *("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        ),
        "attn_logit_softcapping": ("attn_logit_softcapping",),
        "final_logit_softcapping": ("final_logit_softcapping",),
        "expert_count": ("num_experts",),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "vocab_size": ("vocab_size",),
    }
    keys = {
        key: next((built[name] for name in names if name in built), None)
        for key, names in of_fields.items()
    }
    if "head_dim" in built:
        keys |= {"attention.key_length": d_head, "attention.value_length": d_head}
    rope = built.get("rope_parameters")
    if rope:
        whole, windowed = rope.get("full_attention", rope), rope.get("sliding_attention")
        keys["rope.freq_base"] = float(whole["rope_theta"])
        keys["rope.dimension_count"] = int(d_head * whole.get("partial_rotary_factor", 1))
        if windowed is not None:
            keys["rope.freq_base_swa"] = float(windowed["rope_theta"])
        if whole["rope_type"] != "default":
            keys["rope.scaling.type"] = whole["rope_type"]
            keys["rope.scaling.factor"] = float(whole["factor"])
            keys["rope.scaling.original_context_length"] = whole.get(
                "original_max_position_embeddings"
            )
    return keys


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    adds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adds[type(value)](key, value)


def _add_tokenizer(writer: GGUFWriter, adds_bos: bool) -> None:
    made = tokenizer()
    state = made.backend_tokenizer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    vocabulary = sorted(state.get_vocab(), key=state.get_vocab().__getitem__)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, *[1] * (len(vocabulary) - 1)])  # <bos> is a control token
    writer.add_token_merges(["e r", "t h", "i n", "a t", "o n", "r e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(adds_bos)


def _stored(
    name: str, tensor: torch.Tensor, architecture: str, config: PreTrainedConfig
) -> Tensors:
    """Yield the tensors that a parameter becomes in a file, by their names there."""
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    stem, dot, suffix = name.removeprefix("transformer.").rpartition(".")
    block = re.search(r"\.(\d+)\.", name)
    if name.endswith("mlp.experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"blk.{block[1]}.ffn_{part}_exps.weight", half
        return
    for end, stored in _WITHOUT_SUFFIX.items():
        if name.endswith(end):
            yield f"blk.{block[1]}.{stored}", _change(architecture)(name, tensor, config)
            return
    found = names.get_name(stem) or names.get_name(f"transformer.{stem}")
    stored = name if found is None else f"{found}{dot}{suffix}"
    yield stored, _change(architecture)(name, tensor, config)


# Parameters whose names in a file do not follow from gguf's own table, by the ends of their names.
_WITHOUT_SUFFIX = {
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}


def _with_pairs_side_by_side(
    name: str, tensor: torch.Tensor, config: PreTrainedConfig
) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    n_heads = heads.get(name.split(".")[-2])
    if n_heads is None:
        return tensor
    halves = tensor.reshape(n_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _with_q_k_v_apart(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    if "query_key_value" not in name:
        return tensor
    d_head = config.hidden_size // config.num_attention_heads
    by_head = tensor.reshape(config.num_attention_heads, 3, d_head, *tensor.shape[1:])
    return by_head.transpose(0, 1).reshape(tensor.shape)


def _of_qwen35(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    if name.endswith("A_log"):
        return -tensor.exp()
    if name.endswith("conv1d.weight"):
        return tensor[:, 0]
    is_offset = name.endswith("norm.weight") and "linear_attn" not in name
    return tensor + 1 if is_offset else tensor


def _with_gains_around_one(name: str, tensor: torch.Tensor, _: PreTrainedConfig) -> torch.Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


Change = Callable[[str, torch.Tensor, PreTrainedConfig], torch.Tensor]
_CHANGES: dict[str, Change] = {
    "llama": _with_pairs_side_by_side,
    "gemma2": _with_gains_around_one,
    "gemma3": _with_gains_around_one,
    "nemotron": _with_gains_around_one,
    "gpt2": lambda name, x, _: x.T if x.ndim == 2 and ".h." in name else x,  # outputs first
    "bloom": _with_q_k_v_apart,
    "qwen2moe": lambda name, x, _: x[0] if name.endswith("shared_expert_gate.weight") else x,
    "qwen35": _of_qwen35,
    "lfm2": lambda name, x, _: x[:, 0] if name.endswith("conv.conv.weight") else x,
}


def _change(architecture: str) -> Change:
    return _CHANGES.get(architecture, lambda name, tensor, config: tensor)
