"""HookedTransformers of Llama-like Hugging Face models: configuration and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformers import PreTrainedConfig, PreTrainedModel


def hooked_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a Llama-like Hugging Face configuration in the fields of TransformerLens.

    Raises:
        ValueError: for RoPE in some layers only.
    """
    switches = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    if len(set(switches)) != 1:
        raise ValueError("HookedTransformer has RoPE in all layers or in none; use a bridge")
    rope = bool(switches[0])
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dict(
        model_name="rope-llama" if rope else "nope-llama",
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        d_head=d_head,
        n_heads=config.num_attention_heads,
        n_key_value_heads=config.num_key_value_heads,
        d_mlp=config.intermediate_size,
        d_vocab=config.vocab_size,
        n_ctx=config.max_position_embeddings,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        final_rms=True,
        eps=config.rms_norm_eps,
        positional_embedding_type="rotary" if rope else "standard",
        rotary_dim=d_head if rope else None,
        rotary_base=config.rope_parameters["rope_theta"],
        rotary_adjacent_pairs=False,
        tie_word_embeddings=config.tie_word_embeddings,
        default_prepend_bos=False,
        init_weights=False,
        device="cpu",
    )


def build_hooked(config: HookedTransformerConfig) -> HookedTransformer:
    """Build the HookedTransformer of a configuration, with random weights if it asks for them."""
    from transformer_lens import HookedTransformer

    model = HookedTransformer(config).eval()
    if config.positional_embedding_type == "standard":
        # TransformerLens has no position embedding type "none".
        model.pos_embed.W_pos.data.zero_()
    return model


def hooked_weights(hf: PreTrainedModel, n_heads: int, n_kv_heads: int) -> dict[str, Tensor]:
    """Return a Llama-like model's weights under HookedTransformer's names and in its layouts."""
    body = hf.model
    weights = {
        "embed.W_E": body.embed_tokens.weight,
        "unembed.W_U": hf.lm_head.weight.T,
        "unembed.b_U": torch.zeros(hf.config.vocab_size),
        "ln_final.w": body.norm.weight,
    }
    for index, block in enumerate(body.layers):
        attn, mlp = block.self_attn, block.mlp
        ours = {
            "ln1.w": block.input_layernorm.weight,
            "ln2.w": block.post_attention_layernorm.weight,
            "attn.W_Q": _per_head(attn.q_proj.weight, n_heads),
            "attn._W_K": _per_head(attn.k_proj.weight, n_kv_heads),
            "attn._W_V": _per_head(attn.v_proj.weight, n_kv_heads),
            "attn.W_O": rearrange(attn.o_proj.weight, "m (head h) -> head h m", head=n_heads),
            "mlp.W_gate": mlp.gate_proj.weight.T,
            "mlp.W_in": mlp.up_proj.weight.T,
            "mlp.W_out": mlp.down_proj.weight.T,
        }
        weights.update({f"blocks.{index}.{name}": weight for name, weight in ours.items()})
    return {name: weight.detach().float() for name, weight in weights.items()}


def _per_head(weight: Tensor, n_heads: int) -> Tensor:
    return rearrange(weight, "(head h) m -> head m h", head=n_heads)
