"""The trained models' shapes, as Hugging Face configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import SmolLM3Config

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
