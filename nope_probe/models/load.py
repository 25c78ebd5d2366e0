"""Load a model by name, and check its parity with plain transformers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nope_probe.errors import UserError
from nope_probe.models.bridge import boot_bridge, wrap_in_bridge
from nope_probe.models.context import validate_context
from nope_probe.models.hub import reading_model
from nope_probe.models.huggingface import DeviceMap, load_hugging_face
from nope_probe.models.info import ModelInfo, check_parity, describe, reference_of
from nope_probe.models.names import CHECKPOINTS, PARAMETER_FREE, resolve, validate_revision
from nope_probe.models.parameter_free import (
    build,
    has_hooked_transformer,
    hooked_config,
    hooked_weights,
    parameter_free,
)

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadedModel:
    """A hooked model, its tokenizer (None for parameter-free models) and its info.

    The tokenizer is as on disk. `model.tokenizer` is a copy in which TransformerLens has set
    missing special tokens, for example BOS to EOS.
    """

    model: HookedTransformer | TransformerBridge
    tokenizer: PreTrainedTokenizerBase | None
    info: ModelInfo

    def __repr__(self) -> str:
        """Return the model's name, kind, sizes and parity."""
        return f"LoadedModel: {self.info.summary}"


def to_hooked(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> HookedTransformer | TransformerBridge:
    """Return a Llama-like Hugging Face model as a hooked model, in float32 on the CPU.

    The copy is a HookedTransformer, or with TransformerLens 4 a TransformerBridge.

    Raises:
        ValueError: for RoPE in some layers only, which HookedTransformer does not have.
    """
    if not has_hooked_transformer():
        return wrap_in_bridge(deepcopy(hf).to("cpu", torch.float32), deepcopy(tokenizer))
    model = build(hooked_config(hf.config))
    state = model.state_dict()
    state.update(hooked_weights(hf, hf.config.num_attention_heads, hf.config.num_key_value_heads))
    model.load_state_dict(state)
    if tokenizer is not None:
        model.set_tokenizer(deepcopy(tokenizer))
    return model


def load(
    name: str,
    *,
    n_layers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device_map: DeviceMap | None = None,
    n_ctx: int | None = None,
) -> LoadedModel:
    """Load a model by name and check its parity.

    Args:
        name: `parameter-free`, `parameter-free-rope`, or the shipped `nope-tiny`, `rope-tiny` (as
            HookedTransformers, if TransformerLens has them); or a friendly name such as
            `llama-3.1-8b`, a Hub id or a local Hugging Face folder (through TransformerBridge, raw
            weights).
        n_layers: load only the first layers.
        device: a torch device.
        dtype: float32 by default, bfloat16 for Hugging Face models on CUDA.
        revision: a Hub revision.
        device_map: how Hugging Face places a large model on several devices (`auto`, `balanced`,
            `sequential`, or a device per part); `device` is then only their kind.
        n_ctx: how many positions the model is to take beyond its configured context; impossible
            for a model with a table of positions, such as learned embeddings.

    Raises:
        UserError: for an unknown model, a revision of a model that is not on the Hub, a table of
            positions shorter than n_ctx, or a model that fails parity.

    Example:
        >>> from nope_probe import load
        >>> load("nope-tiny").info.rope_layers
        (False, False, False, False)
    """
    key = name.lower()
    if n_layers is not None and n_layers < 1:
        raise UserError(f"expected at least 1 layer, got {n_layers}")
    if revision is not None:
        validate_revision(name)
    if device_map is not None and key in (*CHECKPOINTS, *PARAMETER_FREE):
        raise UserError(f"{name} is small and stays on one device: leave out --device-map")
    if n_ctx is not None:
        validate_context(name, n_ctx, beyond=True, revision=revision)
    if key in PARAMETER_FREE:
        config = parameter_free(n_layers or 4, rope=key == "parameter-free-rope")
        config.n_ctx = max(n_ctx or 0, config.n_ctx)
        model = _placed(build(config), device, dtype)
        info = check_parity(model, describe(model, key))
        return LoadedModel(model=model, tokenizer=None, info=info)
    if key in CHECKPOINTS:
        return _load_shipped(key, n_layers, device, dtype, n_ctx)
    return _load_bridge(name, n_layers, device, dtype, revision, device_map, n_ctx)


def _load_shipped(
    name: str,
    n_layers: int | None,
    device: str,
    dtype: torch.dtype | None,
    n_ctx: int | None = None,
) -> LoadedModel:
    hf, tokenizer = load_hugging_face(
        str(CHECKPOINTS[name]), n_layers=n_layers, dtype=torch.float32
    )
    hf.config.max_position_embeddings = max(n_ctx or 0, hf.config.max_position_embeddings)
    model = _placed(to_hooked(hf, tokenizer), device, dtype)
    model.cfg.model_name = name
    info = describe(model, name, source=Path(hf.name_or_path).name, architecture=type(hf).__name__)
    info = check_parity(model, info, reference_of(hf.to(device)))
    return LoadedModel(model=model, tokenizer=tokenizer, info=info)


def _placed(
    model: HookedTransformer | TransformerBridge, device: str, dtype: torch.dtype | None
) -> HookedTransformer | TransformerBridge:
    model = model.to(device, print_details=False)
    return model.to(dtype or torch.float32, print_details=False)


def _load_bridge(
    name: str,
    n_layers: int | None,
    device: str,
    dtype: torch.dtype | None,
    revision: str | None,
    device_map: DeviceMap | None,
    n_ctx: int | None = None,
) -> LoadedModel:
    source = resolve(name)
    on_gpu = torch.device(device).type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    hf, tokenizer = load_hugging_face(
        source, n_layers=n_layers, dtype=dtype, revision=revision, device_map=device_map
    )
    if device_map is None:
        hf = hf.to(device)
    with reading_model(source, "forward pass"):
        reference = reference_of(hf)  # before the bridge rewires the model in place
    on_one = device if device_map is None else None
    model = boot_bridge(source, hf, deepcopy(tokenizer), dtype, on_one)
    info = describe(
        model,
        name,
        source=source,
        architecture=type(hf).__name__,
        revision=getattr(hf.config, "_commit_hash", None) or revision,
    )
    info = check_parity(model, info, reference)
    model.cfg.n_ctx = max(n_ctx or 0, model.cfg.n_ctx)
    return LoadedModel(model=model, tokenizer=tokenizer, info=info)
