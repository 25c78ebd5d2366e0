"""Models: the paper's HookedTransformer configurations, and `load(name)` for everything else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from nope_probe.bridging import bridge
from nope_probe.contract import ModelCard, check, describe, reference_logits
from nope_probe.conversion import hooked_config, hooked_weights
from nope_probe.errors import UserError
from nope_probe.hub import CHECKPOINTS, load_hugging_face, resolve
from nope_probe.placement import DeviceMap

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, SmolLM3Config

Norm = Literal["l2", "layernorm-sqrt-d", "layernorm-d"]
Size = Literal["tiny", "1.5b"]
PARAMETER_FREE = ("parameter-free", "parameter-free-rope")

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


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready for hooks, with its tokenizer and what is known of it."""

    model: HookedTransformer | TransformerBridge
    tokenizer: PreTrainedTokenizerBase | None
    card: ModelCard


def parameter_free(
    n_layers: int = 4,
    d_model: int = 64,
    norm: Norm = "l2",
    rope: bool = False,
    causal: bool = True,
) -> HookedTransformerConfig:
    """Configure the parameter-free transformer, eq. (1): softmax(causal(Y Y^T)) Y + X.

    `build` sets its weights to identities. RMS norm is sqrt(d) times the paper's L2 norm, which
    `W_V = I / sqrt(d)` and a score scale of 1/d undo. The LayerNorm variants (appendix B) have
    W_V = I and scores over sqrt(d) or d. Inputs are vectors: run the model with
    `start_at_layer=0, stop_at_layer=n_layers`.

    Raises:
        ValueError: for no layers, no dimensions, an odd dimension with RoPE or an unknown norm.

    Example:
        >>> from nope_probe.models import build, parameter_free
        >>> model = build(parameter_free(n_layers=2, d_model=8))
        >>> model(torch.randn(1, 5, 8), start_at_layer=0, stop_at_layer=2).shape
        torch.Size([1, 5, 8])
    """
    from transformer_lens import HookedTransformerConfig

    if n_layers < 1 or d_model < 1:
        raise ValueError(f"expected at least 1 layer and 1 dimension, got {n_layers}, {d_model}")
    if rope and d_model % 2:
        raise ValueError(
            f"RoPE turns pairs of coordinates: expected an even d_model, got {d_model}"
        )
    if norm not in ("l2", "layernorm-sqrt-d", "layernorm-d"):
        raise ValueError(f"expected norm l2, layernorm-sqrt-d or layernorm-d, got {norm!r}")
    return HookedTransformerConfig(
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


def nope_llama(size: Size = "tiny", rope: bool = False) -> HookedTransformerConfig:
    """Configure the paper's trained Llama without position encoding, or its RoPE twin."""
    return hooked_config(smollm3_config(size, rope))


def smollm3_config(size: Size, rope: bool) -> SmolLM3Config:
    """Configure the same model for Hugging Face, whose `no_rope_layers` switches RoPE natively."""
    from transformers import SmolLM3Config

    if size not in SHAPES:
        raise ValueError(f"expected size {' or '.join(SHAPES)}, got {size!r}")
    shape = SHAPES[size]
    # SmolLM3 reads 0 as NoPE and 1 as RoPE.
    switches = [int(rope)] * shape["num_hidden_layers"]
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return SmolLM3Config(**shape, **tokens, no_rope_layers=switches, use_cache=False)


def build(config: HookedTransformerConfig) -> HookedTransformer:
    """Build a HookedTransformer from a configuration of this module.

    Parameter-free models get identities for weights; a NoPE model gets `W_pos = 0`, because
    TransformerLens has no position embedding type "none".
    """
    from transformer_lens import HookedTransformer

    model = HookedTransformer(config).eval()
    if config.positional_embedding_type == "standard":
        model.pos_embed.W_pos.data.zero_()
    if str(config.model_name).startswith("parameter-free"):
        _set_identities(model)
    return model.requires_grad_(False)


def _set_identities(model: HookedTransformer) -> None:
    d = model.cfg.d_model
    value_scale = d**-0.5 if model.cfg.normalization_type == "RMSPre" else 1.0
    for block in model.blocks:
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            scale = value_scale if name == "W_V" else 1.0
            getattr(block.attn, name).data.copy_(scale * torch.eye(d)[None])


def to_hooked(hf: PreTrainedModel) -> HookedTransformer:
    """Convert a Llama-like Hugging Face model into a HookedTransformer with the same weights."""
    model = build(hooked_config(hf.config))
    state = model.state_dict()
    state.update(hooked_weights(hf, hf.config.num_attention_heads, hf.config.num_key_value_heads))
    model.load_state_dict(state)
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
        name: `parameter-free`, `parameter-free-rope`; `nope-tiny`, `rope-tiny` (shipped, as
            HookedTransformers); a friendly name such as `llama-3.1-8b`, a Hub id or a local Hugging
            Face folder (through TransformerBridge, raw weights).
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
    model = to_hooked(hf)
    model.set_tokenizer(tokenizer)
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
