"""GGUF files of tiny models, written with llama.cpp's own writer from a model in memory."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from support.tiny_models import CONFIGS, randomised, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

# llama.cpp's names of a Llama's tensors.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    adds_bos: bool = False,
    quantised: bool = False,
    more: dict[str, torch.Tensor] | None = None,
    rope_scaling: str | None = None,
) -> Path:
    """Write a Llama and the tiny tokenizer to a GGUF file, in float32 or Q8_0.

    Args:
        path: the file.
        model: the model.
        architecture: the architecture that the file states.
        adds_bos: whether the file's tokenizer adds BOS.
        quantised: whether matrices of rows of 32 numbers become Q8_0.
        more: further tensors.
        rope_scaling: the scaling of RoPE that the file states.
    """
    config: LlamaConfig = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_name("a training run")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if quantised else LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if rope_scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", rope_scaling)
    _add_tokenizer(writer, adds_bos)
    for name, tensor in (model.state_dict() | (more or {})).items():
        numbers: Any = _permuted(name, tensor, config).numpy()
        kind = GGMLQuantizationType.F32
        if quantised and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            numbers = quantize(numbers, kind)
        writer.add_tensor(_name_in_file(name), numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(hidden_size: int = 42, *, biases: bool = False) -> LlamaForCausalLM:
    """Return a random Llama, by default without the biases that transformers drops."""
    config = CONFIGS["llama"]()
    config.attention_bias, config.mlp_bias, config.hidden_size = biases, False, hidden_size
    return randomised(config, seed=1)


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


def _name_in_file(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    if not stem.startswith("model.layers."):
        return name
    _, _, block, part = stem.split(".", 3)
    return f"blk.{block}.{_NAMES[part]}.{kind}"


def _permuted(name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Put a rotary pair's two rows side by side, as llama.cpp does for Llamas."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    n_heads = heads.get(name.split(".")[-2])
    if n_heads is None:
        return tensor.contiguous()
    halves = tensor.reshape(n_heads, 2, config.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
