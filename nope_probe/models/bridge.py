"""TransformerBridges of Hugging Face models, and of the configured models on TransformerLens 4."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.layers.model import blocks_of, layers_of

if TYPE_CHECKING:
    from transformer_lens import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, SmolLM3Config


def boot_bridge(
    source: str,
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: str | None,
) -> TransformerBridge:
    """Return the bridge of a Hugging Face model, with raw weights.

    Args:
        source: the Hub id or folder of the model.
        hf: the model, which is rewired in place.
        tokenizer: its tokenizer.
        dtype: its dtype.
        device: its device; None if its parts are on several devices.

    Raises:
        UserError: if TransformerLens does not support the architecture, or if the model has no
            attention that can be read.
    """
    from transformer_lens.model_bridge import TransformerBridge

    with reading(f"TransformerLens cannot read {source}, a {type(hf).__name__}"):
        model = TransformerBridge.boot_transformers(
            source, hf_model=hf, tokenizer=tokenizer, dtype=dtype, device=device
        )
    if getattr(hf.config, "is_decoder", False):
        model.cfg.attention_dir = "causal"  # TransformerLens calls any BERT an encoder
    _add_attention(model)
    _add_position_embeddings(model)
    validate_attention(source, model)
    _run_as_transformers(model)
    for layer in layers_of(model):
        layer.attach_tap()
    return model


# Attention in blocks where TransformerLens has hook points for the residual stream only.
_WHOLE_BLOCKS = {
    "NemotronHForCausalLM": "mixer",
    "RecurrentGemmaForCausalLM": "temporal_block",
}


def _add_attention(model: TransformerBridge) -> None:
    """Add TransformerLens's hook points to attention that lacks them."""
    from transformer_lens.model_bridge.component_setup import setup_submodules
    from transformer_lens.model_bridge.generalized_components import AttentionBridge, LinearBridge

    name = _WHOLE_BLOCKS.get(type(model.original_model).__name__)
    if name is None:
        return
    for block in model.blocks:
        hf_block = block.original_component
        module = getattr(hf_block._modules[name], "original_component", hf_block._modules[name])
        if not hasattr(module, "q_proj"):
            continue
        projections = {letter: LinearBridge(name=f"{letter}_proj") for letter in "qkvo"}
        attn = AttentionBridge(name=name, config=model.cfg, submodules=projections)
        attn.set_original_component(module)
        setup_submodules(attn, model.adapter, module)
        attn.setup_hook_compatibility()
        attn.hook_z = attn.o.hook_in
        hf_block._modules[name] = attn
        block.add_module("attn", attn)
    model.clear_hook_registry()
    model._initialize_hook_registry()


def _add_position_embeddings(model: TransformerBridge) -> None:
    """Add a hook point to position embeddings without weights (XGLM's sinusoids)."""
    from transformer_lens.model_bridge.generalized_components import PosEmbedBridge

    modules = model.original_model.base_model._modules
    embedding = modules.get("embed_positions")
    if embedding is not None and "pos_embed" not in model._modules:
        positions = PosEmbedBridge(name="embed_positions")
        positions.set_original_component(embedding)
        modules["embed_positions"] = positions
        model.add_module("pos_embed", positions)


def _run_as_transformers(model: TransformerBridge) -> None:
    """Run blocks that do not attend as transformers does, not by TransformerLens's own code."""
    from transformer_lens.model_bridge.generalized_components import RotaryEmbeddingBridge
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    for module in model.original_model.modules():
        for name, child in module._modules.items():
            if isinstance(child, RotaryEmbeddingBridge) and child.original_component is None:
                module._modules[name] = None  # without RoPE (Granite 4), there is no module to call
    for block in blocks_of(model):
        linear = block._modules.get("linear_attn")
        if linear is not None:
            vars(linear)["forward"] = partial(GeneralizedComponent.forward, linear)


def validate_attention(source: str, model: TransformerBridge) -> None:
    """Check that some block attends.

    Raises:
        UserError: if no block attends.
    """
    layers = layers_of(model) if hasattr(model, "blocks") else []
    if not layers:
        raise UserError(
            f"{source} has no attention in a form that can be read (one module of a block, with "
            "hook points of TransformerLens): there are no scores to map; a hybrid model may "
            "attend in later layers"
        )


# Fields of `model.cfg` in which a bridge describes SmolLM3 in general, not this model.
_CONFIGURED = (
    "attention_dir",
    "attn_only",
    "attn_scale",
    "eps",
    "model_name",
    "normalization_type",
    "positional_embedding_type",
    "rotary_dim",
)


def wrap_in_bridge(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> TransformerBridge:
    """Return the bridge of a Hugging Face model, which is rewired in place and frozen."""
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
    """Set a bridge's attention to bidirectional: transformers passes an encoder no mask at all."""
    adapter.component_mapping["blocks"].submodules["attn"].is_causal = False


def build_bridge(config: TransformerBridgeConfig) -> TransformerBridge:
    """Build the bridge of a configuration, with weights drawn at random."""
    model = wrap_in_bridge(_smollm3(config))
    for name in _CONFIGURED:
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
