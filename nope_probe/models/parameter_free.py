"""Models built from a TransformerLens configuration: the parameter-free transformer, Llamas.

On TransformerLens 4, such a model is the bridge of a SmolLM3.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformer_lens
from torch import nn
from transformer_lens import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from nope_probe.errors import UserError, validate_types
from nope_probe.files import JsonObject
from nope_probe.hooks.layers.model import layers_of
from nope_probe.models.names import PARAMETER_FREE_CONTEXT
from nope_probe.removal import WEIGHTS
from nope_probe.stages import Norm

if TYPE_CHECKING:  # TransformerLens 4 has neither
    from transformer_lens import HookedTransformer, HookedTransformerConfig


Configuration: TypeAlias = "HookedTransformerConfig | TransformerBridgeConfig"
Hooked: TypeAlias = "HookedTransformer | TransformerBridge"


def has_hooked_transformer() -> bool:
    """Return whether the installed TransformerLens has HookedTransformer, as before 4.0.

    All code that depends on TransformerLens's version asks this function.
    """
    return int(version("transformer-lens").partition(".")[0]) < 4


def parameter_free(
    n_layers: int = 4, d_model: int = 64, norm: Norm = "l2", rope: bool = False, causal: bool = True
) -> Configuration:
    """Return the configuration of the parameter-free transformer: softmax(causal(Y Y^T)) Y + X.

    This is eq. (1); `build` sets the weights to identities. RMS norm is sqrt(d) times the paper's
    L2 norm, which `W_V = I / sqrt(d)` and a score scale of 1/d cancel. The LayerNorm variants
    (appendix B) have W_V = I and scores over sqrt(d) or d. Inputs are vectors, as `gaussian` draws
    them. `load("parameter-free")` and `load("parameter-free-rope")` have the default settings.

    Args:
        n_layers: blocks.
        d_model: d, also the size of the single head.
        norm: the norm of each block's input.
        rope: whether queries and keys are rotated.
        causal: whether there is a causal mask.

    Raises:
        UserError: for no layers, no dimensions, an odd dimension with RoPE or an unknown norm.

    Example:
        >>> from nope_probe import build, capture_scores, gaussian, parameter_free
        >>> model = build(parameter_free(n_layers=2, d_model=8, norm="layernorm-d"))
        >>> capture_scores(model, gaussian(n_seqs=16, seq_len=5, d_model=8).inputs).mean.shape
        torch.Size([2, 5, 5])
    """
    validate_types({"norm": Norm}, {"norm": norm})
    if n_layers < 1 or d_model < 1:
        raise UserError(f"expected at least 1 layer and 1 dimension, got {n_layers}, {d_model}")
    if rope and d_model % 2:
        raise UserError(f"RoPE turns pairs of coordinates: expected an even d_model, got {d_model}")
    return configuration(
        model_name="parameter-free-rope" if rope else "parameter-free",
        n_layers=n_layers,
        d_model=d_model,
        d_head=d_model,
        n_heads=1,
        n_ctx=PARAMETER_FREE_CONTEXT,
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


def configuration(**settings: Any) -> Configuration:
    """Return a configuration with the given fields, of the class that `build` takes."""
    name = "HookedTransformerConfig" if has_hooked_transformer() else "TransformerBridgeConfig"
    return getattr(transformer_lens, name)(**settings)


def build(config: Configuration) -> Hooked:
    """Build the hooked model of a configuration: a HookedTransformer, or a bridge on 4.x.

    A parameter-free model gets identities as weights; set the weights of other models yourself. The
    unused embeddings are equal in all parameter-free models, and so are their fingerprints.

    Example:
        >>> from nope_probe import build, parameter_free
        >>> build(parameter_free(n_layers=3, d_model=8, rope=True)).cfg.n_layers
        3
    """
    has_identities = str(config.model_name).startswith("parameter-free")
    with torch.random.fork_rng(devices=[], enabled=has_identities):
        if has_identities:
            torch.default_generator.manual_seed(0)
        if has_hooked_transformer():
            with warnings.catch_warnings():  # that the class goes in 4.0, where a bridge is built
                warnings.simplefilter("ignore", DeprecationWarning)
                model = transformer_lens.HookedTransformer(config).eval()
            if config.positional_embedding_type == "standard":
                # TransformerLens has no position embedding type "none".
                model.pos_embed.W_pos.data.zero_()
        else:
            model = build_bridge(config)
    if has_identities:
        _set_identities(model)
    return model.requires_grad_(False)


def _set_identities(model: Hooked) -> None:
    d = model.cfg.d_model
    value_size = d**-0.5 if model.cfg.normalization_type == "RMSPre" else 1.0
    for layer in layers_of(model):
        for name in WEIGHTS:
            weight, size = layer.weight(name), value_size if name == "w_v" else 1.0
            weight.data.copy_(size * torch.eye(d).expand_as(weight))


def hooked_config(config: PreTrainedConfig) -> Configuration:
    """Return TransformerLens's configuration of a Llama-like Hugging Face model.

    Raises:
        UserError: for RoPE in some layers only.
    """
    switches = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    if len(set(switches)) != 1:
        raise UserError("HookedTransformer has RoPE in all layers or in none; use a bridge")
    rope = bool(switches[0])
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return configuration(
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


# Fields of `model.cfg` in which a bridge describes SmolLM3 in general, not this model.
_CONFIGURED = (
    *("attention_dir", "attn_only", "attn_scale", "eps", "model_name", "normalization_type"),
    *("positional_embedding_type", "rotary_dim"),
)


def wrap_in_bridge(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> TransformerBridge:
    """Return the bridge of a Hugging Face model, which is rewired in place and frozen."""
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
    rotates = int(config.positional_embedding_type == "rotary")
    settings: JsonObject = {
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
        "is_causal": config.attention_dir == "causal",
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "use_cache": False},
    }
    hf = SmolLM3ForCausalLM(SmolLM3Config(**settings)).requires_grad_(False)
    for block in hf.model.layers:
        if config.attn_scale > 0:
            block.self_attn.scaling = 1 / config.attn_scale
        if config.attn_only:
            block.mlp.down_proj.weight.zero_()
        if config.normalization_type == "LNPre":
            block.input_layernorm = nn.LayerNorm(config.d_model, config.eps)
    model = wrap_in_bridge(hf)
    for name in _CONFIGURED:
        setattr(model.cfg, name, getattr(config, name))
    return model
