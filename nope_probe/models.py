"""Models: the paper's configurations, and `load(name)` for everything else."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from nope_probe.bridging import bridge
from nope_probe.configured import Norm, Size, parameter_free_settings, smollm3_config
from nope_probe.contract import ModelCard, check, describe, reference_logits
from nope_probe.conversion import build_hooked, hooked_settings, hooked_weights
from nope_probe.errors import UserError
from nope_probe.hooks.ablation import WEIGHTS
from nope_probe.hooks.layer import layers_of
from nope_probe.hub import CHECKPOINTS, load_hugging_face, resolve
from nope_probe.placement import DeviceMap
from nope_probe.smollm3 import bridge_of, build_bridge

if TYPE_CHECKING:
    from transformer_lens import (
        HookedTransformer,
        HookedTransformerConfig,
        TransformerBridgeConfig,
    )
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Configuration: TypeAlias = HookedTransformerConfig | TransformerBridgeConfig

PARAMETER_FREE = ("parameter-free", "parameter-free-rope")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready for hooks, with its tokenizer and what is known of it."""

    model: HookedTransformer | TransformerBridge
    tokenizer: PreTrainedTokenizerBase | None
    card: ModelCard


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
    W_V = I and scores over sqrt(d) or d. Inputs are vectors: `hooks.tap.run_blocks` runs them.

    Raises:
        ValueError: for no layers, no dimensions, an odd dimension with RoPE or an unknown norm.

    Example:
        >>> from nope_probe.hooks.tap import run_blocks
        >>> from nope_probe.models import build, parameter_free
        >>> model = build(parameter_free(n_layers=2, d_model=8))
        >>> run_blocks(model, torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """
    return _configuration(**parameter_free_settings(n_layers, d_model, norm, rope, causal))


def nope_llama(size: Size = "tiny", rope: bool = False) -> Configuration:
    """Configure the paper's trained Llama without position encoding, or its RoPE twin."""
    return hooked_config(smollm3_config(size, rope))


def hooked_config(config: PreTrainedConfig) -> Configuration:
    """Translate a Llama-like Hugging Face configuration.

    Raises:
        ValueError: for RoPE in some layers only.
    """
    return _configuration(**hooked_settings(config))


def _configuration(**settings: Any) -> Configuration:
    """Configure a model in TransformerLens's words, which outlived HookedTransformer."""
    if has_hooked_transformer():
        from transformer_lens import HookedTransformerConfig

        return HookedTransformerConfig(**settings)
    from transformer_lens import TransformerBridgeConfig

    return TransformerBridgeConfig(**settings)


def build(config: Configuration) -> HookedTransformer | TransformerBridge:
    """Build the model of a configuration of this module, with the hooks of TransformerLens.

    It is a HookedTransformer, or with TransformerLens 4 a TransformerBridge. Parameter-free models
    get identities for weights, others must be given theirs.
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


def to_hooked(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> HookedTransformer | TransformerBridge:
    """Give a Llama-like Hugging Face model's float32 twin with hooks, on the CPU.

    It is a HookedTransformer, or with TransformerLens 4 a TransformerBridge over a copy.

    Raises:
        ValueError: if HookedTransformer cannot hold it: with RoPE in some layers only.
    """
    if not has_hooked_transformer():
        return bridge_of(deepcopy(hf).to("cpu", torch.float32), tokenizer)
    model = build(hooked_config(hf.config))
    state = model.state_dict()
    state.update(hooked_weights(hf, hf.config.num_attention_heads, hf.config.num_key_value_heads))
    model.load_state_dict(state)
    if tokenizer is not None:
        model.set_tokenizer(tokenizer)
    return model


def load(
    name: str,
    *,
    n_layers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device_map: DeviceMap | None = None,
) -> Loaded:
    """Load a model by name and check that its hooks tell the truth.

    Args:
        name: `parameter-free`, `parameter-free-rope`; `nope-tiny`, `rope-tiny` (shipped; like these
            HookedTransformers, if TransformerLens has them); a friendly name such as
            `llama-3.1-8b`, a Hub id or a local Hugging Face folder (through TransformerBridge, raw
            weights).
        n_layers: load only the first layers.
        device: a torch device.
        dtype: float32 by default, bfloat16 for Hugging Face models on CUDA.
        revision: a Hub revision.
        device_map: how Hugging Face spreads a large model over several devices (`auto`,
            `balanced`, `sequential`, or a device per part); device then says only which kind.

    Raises:
        UserError: if there is no such model, or it fails the contract check.

    Example:
        >>> from nope_probe import load
        >>> load("nope-tiny").card.rope_layers
        (False, False, False, False)
    """
    if device_map is not None and name.lower() in (*CHECKPOINTS, *PARAMETER_FREE):
        raise UserError(f"{name} is small and stays on one device: --device-map is for others")
    if name.lower() in PARAMETER_FREE:
        config = parameter_free(n_layers or 4, rope=name.lower().endswith("rope"))
        model = (
            build(config)
            .to(device, print_details=False)
            .to(dtype or torch.float32, print_details=False)
        )
        return Loaded(model=model, tokenizer=None, card=check(model, describe(model, name.lower())))
    if name.lower() in CHECKPOINTS:
        return _load_shipped(name.lower(), n_layers, device, dtype)
    return _load_bridge(name, n_layers, device, dtype, revision, device_map)


def _load_shipped(
    name: str, n_layers: int | None, device: str, dtype: torch.dtype | None
) -> Loaded:
    hf, tokenizer = load_hugging_face(
        str(CHECKPOINTS[name]), n_layers=n_layers, dtype=torch.float32
    )
    model = to_hooked(hf, tokenizer)
    model = model.to(device, print_details=False).to(dtype or torch.float32, print_details=False)
    card = describe(model, name, source=Path(hf.name_or_path).name, architecture=type(hf).__name__)
    return Loaded(
        model=model, tokenizer=tokenizer, card=check(model, card, reference_logits(hf.to(device)))
    )


def _load_bridge(
    name: str,
    n_layers: int | None,
    device: str,
    dtype: torch.dtype | None,
    revision: str | None,
    device_map: DeviceMap | None,
) -> Loaded:
    source = resolve(name)
    on_gpu = torch.device(device).type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    hf, tokenizer = load_hugging_face(
        source, n_layers=n_layers, dtype=dtype, revision=revision, device_map=device_map
    )
    if device_map is None:
        hf = hf.to(device)
    # The bridge rewires the Hugging Face model in place: ask it before.
    reference = reference_logits(hf)
    model = bridge(source, hf, tokenizer, dtype, device if device_map is None else None)
    card = describe(model, name, source=source, architecture=type(hf).__name__)
    card = replace(card, revision=getattr(hf.config, "_commit_hash", None) or revision)
    return Loaded(model=model, tokenizer=tokenizer, card=check(model, card, reference))
