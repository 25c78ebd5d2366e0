"""What the configured models are: the parameter-free transformer and the trained Llamas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import SmolLM3Config

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
Size = Literal["tiny", "1.5b"]

# The 1.5B shape is the paper's (section 4.2); its MLP and vocabulary follow from the parameter
# count and Llama-3's tokenizer. Both sizes are trained by nope_probe.train.
SHAPES: dict[Size, dict[str, Any]] = {
    "tiny": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 2048,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "1.5b": {
        "num_hidden_layers": 22,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 5632,
        "vocab_size": 128_256,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
}


def smollm3_config(size: Size, rope: bool) -> SmolLM3Config:
    """Configure a trained Llama, or its RoPE twin, for Hugging Face.

    SmolLM3's `no_rope_layers` switches RoPE natively: 0 is NoPE, 1 is RoPE.

    Raises:
        ValueError: for a size that there is not.
    """
    from transformers import SmolLM3Config

    if size not in SHAPES:
        raise ValueError(f"expected size {' or '.join(SHAPES)}, got {size!r}")
    shape = SHAPES[size]
    switches = [int(rope)] * shape["num_hidden_layers"]
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return SmolLM3Config(**shape, **tokens, no_rope_layers=switches, use_cache=False)


def parameter_free_settings(
    n_layers: int, d_model: int, norm: Norm, rope: bool, causal: bool
) -> dict[str, Any]:
    """Describe the parameter-free transformer in the fields of a TransformerLens configuration.

    Raises:
        ValueError: for no layers, no dimensions, an odd dimension with RoPE or an unknown norm.
    """
    if n_layers < 1 or d_model < 1:
        raise ValueError(f"expected at least 1 layer and 1 dimension, got {n_layers}, {d_model}")
    if rope and d_model % 2:
        raise ValueError(
            f"RoPE turns pairs of coordinates: expected an even d_model, got {d_model}"
        )
    if norm not in ("l2", "layernorm-sqrt-d", "layernorm-d"):
        raise ValueError(f"expected norm l2, layernorm-sqrt-d or layernorm-d, got {norm!r}")
    return dict(
        model_name="parameter-free-rope" if rope else "parameter-free",
        n_layers=n_layers,
        d_model=d_model,
        d_head=d_model,
        n_heads=1,
        n_ctx=4096,
        d_vocab=1,
        attn_only=True,
        normalization_type="RMSPre" if norm == "l2" else "LNPre",
        eps=1e-12,
        attn_scale=d_model**0.5 if norm == "layernorm-sqrt-d" else float(d_model),
        positional_embedding_type="rotary" if rope else "standard",
        rotary_dim=d_model if rope else None,
        rotary_base=10_000,
        attention_dir="causal" if causal else "bidirectional",
        device="cpu",
    )
