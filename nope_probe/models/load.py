"""Load a model by name, and check its parity with plain transformers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.component_setup import setup_submodules
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    LinearBridge,
    PosEmbedBridge,
    RotaryEmbeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.sources.transformers import determine_architecture_from_hf_config
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.layers.model import blocks_of, layers_of
from nope_probe.models.context import context_in, validate_context
from nope_probe.models.gguf import describe_gguf
from nope_probe.models.huggingface import DeviceMap, load_hugging_face, reference_of
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import (
    CHECKPOINTS,
    FETCHED,
    PARAMETER_FREE,
    is_gguf,
    reading_model,
    resolve,
    validate_revision,
)
from nope_probe.models.parameter_free import (
    Hooked,
    build,
    has_hooked_transformer,
    hooked_config,
    hooked_weights,
    parameter_free,
    wrap_in_bridge,
)
from nope_probe.models.parity import check_parity, describe


def to_hooked(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Hooked:
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
    allow_unused: bool = False,
) -> LoadedModel:
    """Load a model by name and check its parity.

    Args:
        name: `parameter-free`, `parameter-free-rope`, or the shipped `nope-tiny`, `rope-tiny` (as
            HookedTransformers, if TransformerLens has them); or a friendly name such as
            `llama-3.1-8b`, a Hub id or a local Hugging Face folder (through TransformerBridge, raw
            weights); or a GGUF file, as a path, as the only one in a folder, or on the Hub
            (`owner/name/FILE.gguf`).
        n_layers: load only the first layers.
        device: a torch device.
        dtype: float32 by default, bfloat16 for Hugging Face models on CUDA.
        revision: a Hub revision.
        device_map: how Hugging Face places a large model on several devices (`auto`, `balanced`,
            `sequential`, or a device per part); `device` is then only their kind.
        n_ctx: how many positions the model is to take beyond its configured context; impossible
            for a model with a table of positions, such as learned embeddings.
        allow_unused: load a model whose files hold tensors that it does not use; `info.unused`
            names them.

    Raises:
        UserError: for an unknown model, a revision of a model that is not on the Hub, a table of
            positions shorter than n_ctx, files with tensors that the model does not use, or a model
            that fails parity.

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
    is_shipped = key in CHECKPOINTS
    source = str(CHECKPOINTS[key]) if is_shipped else resolve(name)
    on_gpu = torch.device(device).type == "cuda"
    by_default = torch.bfloat16 if on_gpu else torch.float32
    read_as = torch.float32 if is_shipped else dtype or by_default
    decoder = load_hugging_face(
        source,
        n_layers=n_layers,
        dtype=read_as,
        revision=revision,
        device_map=device_map,
        allow_unused=allow_unused,
    )
    hf = decoder.model if device_map is not None else decoder.model.to(device)
    with reading_model(source, "forward pass"):
        reference = reference_of(hf)  # before a bridge rewires the model in place
    if is_shipped:
        hf.config.max_position_embeddings = max(n_ctx or 0, hf.config.max_position_embeddings)
        model = _placed(to_hooked(hf, decoder.tokenizer), device, dtype)
        model.cfg.model_name = name = key
    else:
        on_one = device if device_map is None else None
        model = boot_bridge(source, hf, deepcopy(decoder.tokenizer), read_as, on_one)
    gguf = describe_gguf(source, revision) if is_gguf(source) else None
    info = describe(
        model,
        name if gguf is None else key if key in FETCHED else Path(gguf.file).stem,
        source=key if is_shipped else source,
        architecture=type(hf).__name__,
        revision=getattr(hf.config, "_commit_hash", None) or revision,
        gguf=gguf,
    )
    info = replace(info, adapter=decoder.adapter, unused=decoder.unused)
    info = check_parity(model, info, reference)
    model.cfg.n_ctx = max(n_ctx or 0, model.cfg.n_ctx)
    return LoadedModel(model=model, tokenizer=decoder.tokenizer, info=info)


def _placed(model: Hooked, device: str, dtype: torch.dtype | None) -> Hooked:
    model = model.to(device, print_details=False)
    return model.to(dtype or torch.float32, print_details=False)


def boot_bridge(
    source: str,
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    device: str | None,
) -> TransformerBridge:
    """Return the bridge of a Hugging Face model, with raw weights.

    Args:
        source: the Hub id or folder of the model.
        hf: the model, which is rewired in place.
        tokenizer: its tokenizer; None if it has none.
        dtype: its dtype.
        device: its device; None if its parts are on several devices.

    Raises:
        UserError: if TransformerLens does not support the architecture, or if the model has no
            attention that can be read.
    """
    with reading(f"TransformerLens cannot read {source}, a {type(hf).__name__}"):
        if tokenizer is None:  # TransformerLens would look for one
            named = determine_architecture_from_hf_config(hf.config)
            model = build_bridge_from_module(
                hf, named, hf_config=hf.config, dtype=dtype, device=device, model_name=source
            )
        else:
            model = TransformerBridge.boot_transformers(
                source, hf_model=hf, tokenizer=tokenizer, dtype=dtype, device=device
            )
    model.cfg.n_ctx = context_in(hf.config.get_text_config()) or model.cfg.n_ctx
    if getattr(hf.config, "is_decoder", False):
        model.cfg.attention_dir = "causal"  # TransformerLens calls any BERT an encoder
    _add_attention(model)
    _add_position_embeddings(model)
    layers = layers_of(model) if hasattr(model, "blocks") else []
    if not layers:
        raise UserError(
            f"{source} has no attention in a form that can be read (one module of a block, with "
            "hook points of TransformerLens): there are no scores to map; a hybrid model may "
            "attend in later layers"
        )
    _run_as_transformers(model)
    for layer in layers:
        layer.attach_tap()
    return model


# Attention in blocks where TransformerLens has hook points for the residual stream only.
_WHOLE_BLOCKS = {
    "NemotronHForCausalLM": "mixer",
    "RecurrentGemmaForCausalLM": "temporal_block",
}


def _add_attention(model: TransformerBridge) -> None:
    """Add TransformerLens's hook points to attention that lacks them."""
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
    modules = model.original_model.base_model._modules
    embedding = modules.get("embed_positions")
    if embedding is not None and "pos_embed" not in model._modules:
        positions = PosEmbedBridge(name="embed_positions")
        positions.set_original_component(embedding)
        modules["embed_positions"] = positions
        model.add_module("pos_embed", positions)


def _run_as_transformers(model: TransformerBridge) -> None:
    """Run blocks that do not attend as transformers does, not by TransformerLens's own code."""
    for module in model.original_model.modules():
        for name, child in module._modules.items():
            if isinstance(child, RotaryEmbeddingBridge) and child.original_component is None:
                module._modules[name] = None  # without RoPE (Granite 4), there is no module to call
    for block in blocks_of(model):
        # GPT-1's blocks return lists, in which TransformerLens does not look for its hook's tensor.
        if type(model.original_model).__name__ == "OpenAIGPTLMHeadModel":
            hf_block: Any = block.original_component
            hf_block.register_forward_hook(lambda _, args, output: tuple(output))
        linear = block._modules.get("linear_attn")
        if linear is not None:
            vars(linear)["forward"] = partial(GeneralizedComponent.forward, linear)
