"""A tiny random Hugging Face folder for every decoder architecture that TransformerLens reads.

A configuration is the one of its own class in transformers with the sizes of `SIZES`, as far as it
has such fields, and the settings of `SPECIAL`: what some families ask for, and layers of each kind
that a family has (with a window and without, with RoPE and without, with attention and without).
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from support.tiny_models import D_VOCAB, Tiny, change, plain, randomised, tokenizer, tokens
from transformers import CONFIG_MAPPING, PreTrainedConfig

WINDOW = 5
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
SIZES: dict[str, Any] = {
    "vocab_size": D_VOCAB + 6,  # more than the tokenizer: Qwen2's class adds a token
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "use_cache": False,
    "tie_word_embeddings": False,
    **dict.fromkeys(_LAYERS, 3),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads"), 6
    ),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    # MLPs and experts, in multiples of 16 bytes
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 36),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 28),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 28),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 5),
    "num_experts_per_tok": 2,
    # multi-head latent attention
    "q_lora_rank": 23,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
    # state-space and linear layers
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 12),
}
_WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_HYBRID = {"num_hidden_layers": 4, "layer_types": _LINEAR}
_CONV = {"layer_types": ["conv", "full_attention", "full_attention"]}
_ALL_HEADS = {"num_key_value_heads": 6}
SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [1]},
    "bert": {"is_decoder": True},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "deepseek_v2": _ALL_HEADS | {"first_k_dense_replace": 1},
    "deepseek_v3": _ALL_HEADS | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "o_groups": 2,
        "o_lora_rank": 13,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2},
    "falcon-with-alibi": {"alibi": True},
    "falcon_h1": {"mamba_d_ssm": 96},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": D_VOCAB + 6,
        "hidden_size_per_layer_input": 12,
    },
    "glm4_moe_lite": _ALL_HEADS,
    "glm_moe_dsa": _ALL_HEADS | {"index_n_heads": 2, "index_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 5},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _HYBRID,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 8},
    "lfm2": _CONV,
    "lfm2_moe": _CONV | {"num_dense_layers": 1},
    "llama4_text": {
        "layer_types": None,
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": WINDOW,
        "moe_layers": [1],
        "intermediate_size_mlp": 36,
    },
    "mamba2": {"num_heads": 4, "head_dim": 24, "n_groups": 2},
    "modernbert-decoder": {
        "pad_token_id": 0,
        "local_attention": 2 * WINDOW,
        "layer_types": _WINDOWED,
    },
    "nemotron_h": {"n_groups": 2, "mamba_head_dim": 24},
    "olmo": {"clip_qkv": 0.5},
    "olmo_hybrid": _HYBRID,
    "gpt_neox": {"num_key_value_heads": None},
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "recurrent_gemma": {"block_types": ("recurrent", "attention"), "attention_window_size": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "youtu": _ALL_HEADS,
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "use_mem_rope": True,
    },
}


# The model types of the decoders of text that TransformerLens lists and transformers has.
# fmt: off
TYPES = (
    "afmoe", "apertus", "arcee", "bamba", "bert", "bitnet", "bloom", "codegen", "cohere",
    "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v4", "ernie4_5", "ernie4_5_moe",
    "exaone4", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo",
    "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss",
    "gptj", "granite", "granitemoe", "granitemoehybrid", "hrm_text", "hunyuan_v1_dense",
    "jais2", "jamba", "jetmoe", "laguna", "lfm2", "lfm2_moe", "llama", "llama4_text",
    "mamba", "mamba2", "minimax_m2", "ministral3", "mistral", "mixtral",
    "modernbert-decoder", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2",
    "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
    "xglm", "youtu", "zamba2",
)
# fmt: on
# With the variants that `SPECIAL` names TYPE-with-WHAT.
DECODERS = tuple(sorted({*TYPES, *(name for name in SPECIAL if "-with-" in name)}))
_HUB_NAMES = {"phimoe": "PhiMoEForCausalLM"}  # as a config.json on the Hub spells the class


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the configuration of a tiny decoder of a type, or of a variant in `SPECIAL`."""
    kind = CONFIG_MAPPING[model_type.partition("-with-")[0]]
    known = {field.name for field in fields(kind)}
    settings = {name: value for name, value in SIZES.items() if name in known}
    if {"layer_types", "sliding_window"} <= known:
        settings["layer_types"] = _WINDOWED
    return kind(**settings | SPECIAL.get(model_type, {}))


def write_decoder(model_type: str, root: Path, seed: int = 0, **settings: Any) -> Tiny:
    """Write a random decoder of a type to a folder, and load it with plain transformers.

    Args:
        model_type: one of `DECODERS`.
        root: where the folder is to be.
        seed: of the weights and tokens.
        settings: what the configuration has beside or instead of its tiny sizes.
    """
    folder = root / model_type
    config = tiny_config(model_type)
    config.update(settings)
    model = randomised(config, seed)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if model_type in _HUB_NAMES:
        change(folder, architectures=[_HUB_NAMES[model_type]])
    return Tiny(name=model_type, folder=folder, hf=plain(folder), tokens=tokens(seed=seed))
