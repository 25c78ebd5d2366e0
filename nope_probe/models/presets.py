"""The trained models: the paper's Llama without position encoding, and the same with RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from nope_probe.models.hooked import hooked_settings
from nope_probe.models.parameter_free import configuration

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, SmolLM3Config

    from nope_probe.models.parameter_free import Configuration

Size = Literal["tiny", "1.5b"]

# The 1.5B shape is the paper's (section 4.2); its MLP and vocabulary follow from the number of
# parameters and Llama-3's tokenizer. Both sizes are trained by nope_probe.train.
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


def nope_llama(size: Size = "tiny", rope: bool = False) -> Configuration:
    """Return TransformerLens's configuration of the trained Llama, without RoPE or with it."""
    return hooked_config(smollm3_config(size, rope))


def smollm3_config(size: Size, rope: bool) -> SmolLM3Config:
    """Return Hugging Face's configuration of the trained Llama, without RoPE or with it.

    SmolLM3's `no_rope_layers` switches RoPE per layer: 0 is NoPE, 1 is RoPE.

    Raises:
        ValueError: for an unknown size.
    """
    from transformers import SmolLM3Config

    if size not in SHAPES:
        raise ValueError(f"unknown size {size!r}; there are {', '.join(SHAPES)}")
    shape = SHAPES[size]
    switches = [int(rope)] * shape["num_hidden_layers"]
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return SmolLM3Config(**shape, **tokens, no_rope_layers=switches, use_cache=False)


def hooked_config(config: PreTrainedConfig) -> Configuration:
    """Return TransformerLens's configuration of a Llama-like Hugging Face one.

    Raises:
        ValueError: for RoPE in some layers only.
    """
    return configuration(**hooked_settings(config))
