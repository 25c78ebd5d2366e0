"""TransformerBridges: of Hugging Face models, and of the configured models on TransformerLens 4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformer_lens import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, SmolLM3Config


def bridge(
    source: str,
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: str | None,
) -> TransformerBridge:
    """Bridge a model, raw weights, of an architecture that TransformerLens may not know in full.

    Args:
        source: what the model was loaded from.
        hf: the model, which is rewired in place.
        tokenizer: its tokenizer.
        dtype: its dtype.
        device: the device it is on; None if its parts were placed on several.

    Raises:
        UserError: if TransformerLens cannot read it, or it has a block without attention.
    """
    from transformer_lens.model_bridge import TransformerBridge

    try:
        model = TransformerBridge.boot_transformers(
            source, hf_model=hf, tokenizer=tokenizer, dtype=dtype, device=device
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"TransformerLens cannot read {source}, a {type(hf).__name__}: {reason}"
        ) from error
    _validate_blocks_without_attention(source, model)
    return model


def _validate_blocks_without_attention(source: str, model: Any) -> None:
    for index, block in enumerate(model.blocks):
        if not hasattr(block, "attn"):
            raise UserError(
                f"{source} has no attention in L{index} (a state-space, recurrent or linear "
                "one): it has no scores to map"
            )


# What the analyses read off `model.cfg`, and a bridge would say of SmolLM3 at large.
_SAID_OF_A_MODEL = (
    "attention_dir",
    "attn_only",
    "attn_scale",
    "eps",
    "model_name",
    "normalization_type",
    "positional_embedding_type",
    "rotary_dim",
)


def bridge_of(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> TransformerBridge:
    """Bridge a Hugging Face model, which is rewired in place and frozen."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf.eval().requires_grad_(False).set_attn_implementation("eager")
    return build_bridge_from_module(
        hf,
        type(hf).__name__,
        hf_config=hf.config,
        tokenizer=tokenizer,
        post_adapter_hook=_drop_causal_mask if not getattr(hf.config, "is_causal", True) else None,
    )


def _drop_causal_mask(adapter: ArchitectureAdapter) -> None:
    """Keep a bridge from masking where transformers hands an encoder no mask at all."""
    adapter.component_mapping["blocks"].submodules["attn"].is_causal = False


def build_bridge(config: TransformerBridgeConfig) -> TransformerBridge:
    """Build the bridge that a configuration describes, with weights drawn at random."""
    model = bridge_of(_smollm3(config))
    for name in _SAID_OF_A_MODEL:
        setattr(model.cfg, name, getattr(config, name))
    return model


def _smollm3(config: TransformerBridgeConfig) -> PreTrainedModel:
    from transformers import SmolLM3ForCausalLM

    hf = SmolLM3ForCausalLM(_smollm3_config(config)).requires_grad_(False)
    for block in hf.model.layers:
        if config.attn_scale > 0:
            block.self_attn.scaling = 1 / config.attn_scale
        if config.attn_only:
            block.mlp.down_proj.weight.zero_()
        if config.normalization_type == "LNPre":
            block.input_layernorm = nn.LayerNorm(config.d_model, config.eps)
    return hf


def _smollm3_config(config: TransformerBridgeConfig) -> SmolLM3Config:
    from transformers import SmolLM3Config

    rotates = int(config.positional_embedding_type == "rotary")
    settings: dict[str, Any] = {
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.d_model,
        "head_dim": config.d_head,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_key_value_heads or config.n_heads,
        "intermediate_size": 1 if config.attn_only else config.d_mlp,
        "vocab_size": config.d_vocab,
        "max_position_embeddings": config.n_ctx,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.rotary_base)},
        "no_rope_layers": [rotates] * config.n_layers,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "use_cache": False,
    }
    return SmolLM3Config(**settings, is_causal=config.attention_dir == "causal")
