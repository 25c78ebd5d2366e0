"""The parameter-free transformer (eq. 1) as a TransformerLens configuration, and its build."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.names import WEIGHTS, Norm
from nope_probe.models.bridge import build_bridge
from nope_probe.models.hooked import build_hooked

if TYPE_CHECKING:
    from transformer_lens import (
        HookedTransformer,
        HookedTransformerConfig,
        TransformerBridgeConfig,
    )
    from transformer_lens.model_bridge import TransformerBridge

    Configuration: TypeAlias = HookedTransformerConfig | TransformerBridgeConfig


def has_hooked_transformer() -> bool:
    """Tell whether TransformerLens has HookedTransformer, which 4.0 took out.

    All that depends on the version of TransformerLens asks here.
    """
    return int(version("transformer-lens").partition(".")[0]) < 4


def parameter_free(
    n_layers: int = 4,
    d_model: int = 64,
    norm: Norm = "l2",
    rope: bool = False,
    causal: bool = True,
) -> Configuration:
    """Configure the parameter-free transformer, eq. (1): softmax(causal(Y Y^T)) Y + X.

    `build` sets its weights to identities. RMS norm is sqrt(d) times the paper's L2 norm, which
    `W_V = I / sqrt(d)` and a score scale of 1/d undo. The LayerNorm variants (appendix B) have
    W_V = I and scores over sqrt(d) or d. Inputs are vectors, as `gaussian` draws them. The model
    with the default settings is `load("parameter-free")` too, or `load("parameter-free-rope")`.

    Raises:
        ValueError: for no layers, no dimensions, an odd dimension with RoPE or an unknown norm.

    Example:
        >>> from nope_probe import build, capture_scores, gaussian, parameter_free
        >>> model = build(parameter_free(n_layers=2, d_model=8, norm="layernorm-d"))
        >>> capture_scores(model, gaussian(n_seqs=16, seq_len=5, d_model=8).inputs).mean.shape
        torch.Size([2, 5, 5])
    """
    return configuration(**parameter_free_settings(n_layers, d_model, norm, rope, causal))


def configuration(**settings: Any) -> Configuration:
    """Configure a model in TransformerLens's words, which outlived HookedTransformer."""
    if has_hooked_transformer():
        from transformer_lens import HookedTransformerConfig

        return HookedTransformerConfig(**settings)
    from transformer_lens import TransformerBridgeConfig

    return TransformerBridgeConfig(**settings)


def build(config: Configuration) -> HookedTransformer | TransformerBridge:
    """Build the model of a configuration, with the hooks of TransformerLens.

    It is a HookedTransformer, or with TransformerLens 4 a TransformerBridge. Parameter-free models
    get identities for weights, others must be given theirs.

    Example:
        >>> from nope_probe import build, parameter_free
        >>> build(parameter_free(n_layers=3, d_model=8, rope=True)).cfg.n_layers
        3
    """
    model = build_hooked(config) if has_hooked_transformer() else build_bridge(config)
    if str(config.model_name).startswith("parameter-free"):
        _set_identities(model)
    return model.requires_grad_(False)


def _set_identities(model: HookedTransformer | TransformerBridge) -> None:
    d = model.cfg.d_model
    value_size = d**-0.5 if model.cfg.normalization_type == "RMSPre" else 1.0
    for layer in layers_of(model):
        for name in WEIGHTS:
            weight, size = layer.weight(name), value_size if name == "w_v" else 1.0
            weight.data.copy_(size * torch.eye(d).expand_as(weight))


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
