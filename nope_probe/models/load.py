"""Load a model by name, or take one in memory, and check its parity with plain transformers.

A model whose outputs differ from plain transformers' is refused at load, because no measurement on
it would hold.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nope_probe.errors import UserError, as_tuple
from nope_probe.hooks.layers.attention import Attention, relative_error
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.bridges import boot_bridge
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import (
    blocks_of,
    layers_of,
    position_point,
    takes_position_ids,
    tapped,
)
from nope_probe.hooks.layers.objects import Model, as_hooked
from nope_probe.hooks.layers.passes import attention_read, evaluated, run_blocks, traits_of
from nope_probe.hooks.layers.reference import (
    errors_of,
    probe_tokens,
    validate_surroundings,
    validate_within,
    with_reference,
)
from nope_probe.models.context import validate_context
from nope_probe.models.gguf import describe_gguf
from nope_probe.models.huggingface import Decoder, DeviceMap, load_hugging_face
from nope_probe.models.info import LoadedModel, ModelInfo
from nope_probe.models.names import (
    CHECKPOINTS,
    FETCHED,
    PARAMETER_FREE,
    base_of,
    is_gguf,
    reading_model,
    resolve,
    validate_adapter,
    validate_revision,
)
from nope_probe.models.parameter_free import (
    Hooked,
    build,
    has_hooked_transformer,
    hooked_config,
    parameter_free,
    wrap_in_bridge,
)


def to_hooked(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Hooked:
    """Return a Llama-like Hugging Face model as a hooked model, in float32 on the CPU.

    The copy is a HookedTransformer, or with TransformerLens 4 a TransformerBridge.

    Raises:
        UserError: for RoPE in some layers only, which HookedTransformer does not have.
    """
    if not has_hooked_transformer():
        return wrap_in_bridge(deepcopy(hf).to("cpu", torch.float32), deepcopy(tokenizer))
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights

    model = build(hooked_config(hf.config))
    model.load_state_dict(model.state_dict() | convert_llama_weights(hf, model.cfg))
    if tokenizer is not None:
        model.set_tokenizer(deepcopy(tokenizer))
    return model


def load(
    what: str | Path | Model | LoadedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    adapter: str | Path | Sequence[str | Path] | None = None,
    *,
    n_layers: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device_map: DeviceMap | None = None,
    n_ctx: int | None = None,
    allow_unused: bool = False,
) -> LoadedModel:
    """Load a model by name, or take one in memory, and check its parity.

    The weights of a transformers model in memory are shared, not copied, and the model stays as it
    is. Of a multimodal model, the text decoder is taken.

    Args:
        what: `parameter-free`, `parameter-free-rope`, or the shipped `nope-tiny`, `rope-tiny` (as
            HookedTransformers, if TransformerLens has them); or a friendly name such as
            `llama-3.1-8b`, a Hub id or a local Hugging Face folder (through TransformerBridge, raw
            weights); or a GGUF file, as a path, as the only one in a folder, or on the Hub
            (`owner/name/FILE.gguf`); or a model in memory: transformers' (of any dtype, on any
            devices, quantised, in peft, torch.compile or nnsight), a HookedTransformer or a
            TransformerBridge.
        tokenizer: the model's tokenizer; by default the one in its folder, none for a transformers
            model in memory, which then takes tokens and no text.
        adapter: the folder of an adapter (LoRA, DoRA or others that peft merges), or several in
            turn, merged into the weights; without `what`, into the base model that the first names.
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
        UserError: for what is neither a name nor a model, or for an unknown model, a revision of a
            model that is not on the Hub, a table of positions shorter than n_ctx, files with
            tensors that the model does not use, a model that fails parity, or an option without
            effect on a model in memory.

    Example:
        >>> from nope_probe import load
        >>> load("nope-tiny").info.rope_layers
        (False, False, False, False)
    """
    validate_surroundings()
    adapters = [str(folder) for folder in as_tuple(adapter)] if adapter is not None else []
    if what is None:
        what = base_of(adapters[0]) if adapters else ""
    if not isinstance(what, str | Path):
        _validate_in_memory(adapters, n_layers, device, dtype, revision, device_map, n_ctx)
        return as_loaded(what, tokenizer)
    name = os.path.join(".", what) if isinstance(what, Path) else what  # no name, but a path
    key = name.lower()
    if key in CHECKPOINTS and os.path.isdir(name):
        logging.getLogger(__name__).warning(
            "%s is the shipped model; the folder of that name here is ./%s", key, name
        )
    _validate_options(name, adapters, n_layers, revision, device_map)
    if n_ctx is not None:
        validate_context(name, n_ctx, beyond=True, revision=revision)
    if key in PARAMETER_FREE:
        return _parameter_free(key, n_layers, n_ctx, device, dtype)
    is_shipped, source = key in CHECKPOINTS, resolve(name)
    by_default = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    decoder = load_hugging_face(
        source,
        n_layers=n_layers,
        dtype=torch.float32 if is_shipped else dtype or by_default,
        revision=revision,
        device_map=device_map,
        allow_unused=allow_unused,
        adapters=adapters,
    )
    hf = decoder.model if device_map is not None else decoder.model.to(device)
    with reading_model(source, "forward pass"):
        hf, reference = with_reference(hf)  # before a bridge rewires the model in place
    if is_shipped:
        hf.config.max_position_embeddings = max(n_ctx or 0, hf.config.max_position_embeddings)
        model = _placed(to_hooked(hf, decoder.tokenizer), device, dtype)
        model.cfg.model_name = key
    else:
        model = boot_bridge(source, hf, deepcopy(decoder.tokenizer))
    decoder = replace(decoder, model=hf)
    info = _describe(model, name, source, decoder, revision, errors_of(model, reference))
    model.cfg.n_ctx = max(n_ctx or 0, model.cfg.n_ctx)
    if tokenizer is not None:
        model.tokenizer = deepcopy(tokenizer)
    return LoadedModel(model=model, tokenizer=tokenizer or decoder.tokenizer, info=info)


def _parameter_free(
    name: str, n_layers: int | None, n_ctx: int | None, device: str, dtype: torch.dtype | None
) -> LoadedModel:
    """Build a parameter-free transformer, of 4 layers by default."""
    config = parameter_free(n_layers or 4, rope=name == "parameter-free-rope")
    config.n_ctx = max(n_ctx or 0, config.n_ctx)
    model = _placed(build(config), device, dtype)
    info = describe(model, name, error_of_tap(model))
    return LoadedModel(model=model, tokenizer=None, info=info)


def _describe(
    model: Hooked,
    name: str,
    source: str,
    decoder: Decoder,
    revision: str | None,
    errors: Mapping[str, float],
) -> ModelInfo:
    """Return the info of a model that was loaded by name, with its parity."""
    key, hf = name.lower(), decoder.model
    gguf = describe_gguf(source, revision) if is_gguf(source) else None
    shown = name if gguf is None else Path(gguf.file).stem
    info = describe(model, key if key in (*CHECKPOINTS, *FETCHED) else shown, errors)
    is_shipped = key in CHECKPOINTS
    return replace(
        info,
        source=key if is_shipped else source,
        architecture=type(hf).__name__ if is_shipped else info.architecture,
        revision=getattr(hf.config, "_commit_hash", None) or revision,
        gguf=gguf,
        depth=getattr(hf.config, "depth_in_files", info.n_layers),
        adapter=decoder.adapter,
        unused=decoder.unused,
        unread=decoder.unread,
    )


def _validate_in_memory(adapters: Sequence[str], *options: object) -> None:
    """Check that no option of how a model is loaded was given with a model in memory."""
    if adapters:
        raise UserError(
            "an adapter is merged into a model by name: wrap a model in memory by "
            "peft.PeftModel.from_pretrained(model, adapter)"
        )
    if options != (None, "cpu", None, None, None, None):
        raise UserError(
            "a model in memory is taken as it is: leave out the options of how it is loaded"
        )


def _validate_options(
    name: str,
    adapters: Sequence[str],
    n_layers: int | None,
    revision: str | None,
    device_map: DeviceMap | None,
) -> None:
    """Check that options have an effect on a model of this name."""
    key = name.lower()
    if n_layers is not None and n_layers < 1:
        raise UserError(f"expected at least 1 layer, got {n_layers}")
    if revision is not None:
        validate_revision(name)
    if device_map is not None and key in (*CHECKPOINTS, *PARAMETER_FREE):
        raise UserError(f"{name} is small and stays on one device: leave out --device-map")
    if adapters and key in PARAMETER_FREE:
        raise UserError(f"{name} has no weights for an adapter to change")
    for adapter in adapters:
        validate_adapter(adapter)


def _placed(model: Hooked, device: str, dtype: torch.dtype | None) -> Hooked:
    model = model.to(device, print_details=False)
    return model.to(dtype or torch.float32, print_details=False)


def describe(model: HookedModel, name: str, errors: Mapping[str, float] = {}) -> ModelInfo:
    """Return a model's info, with its parity if errors were measured.

    The source is that of a model without weights, the architecture the class of the hooked model,
    or of the model in its bridge.

    Args:
        model: the hooked model.
        name: its name.
        errors: of its outputs, from `errors_of` or `error_of_tap`. That of a bridge's positions is
            added where nothing encodes them.

    Raises:
        UserError: naming the output that is off, and its error.
    """
    traits, layers, n_layers = traits_of(model), layers_of(model), len(blocks_of(model))
    attending, within = {layer.index for layer in layers}, getattr(model, "original_model", model)
    whole = getattr(getattr(within, "config", None), "text_decoder_of", None)
    decoder = "" if whole is None else f", the text decoder of a {whole},"
    rope_layers = tuple(n in traits and traits[n].rotary is not None for n in range(n_layers))
    has_positions = any(rope_layers) or position_point(model) is not None
    if errors and takes_position_ids(model) and not has_positions:
        errors = {**errors, "positions": position_dependence(model)}
    validate_within(name, errors, next(model.parameters()).dtype)
    return ModelInfo(
        name=name,
        source="configuration",
        architecture=f"{type(within).__name__}{decoder}",
        kind=layers[0].kind,
        n_layers=n_layers,
        depth=n_layers,
        n_heads=layers[0].n_heads,
        n_kv_heads=layers[0].n_kv_heads,
        d_head=layers[0].d_head,
        d_model=layers[0].d_model,
        n_ctx=model.cfg.n_ctx,
        d_vocab=model.cfg.d_vocab,
        rope_layers=rope_layers,
        not_attending=tuple(number for number in range(n_layers) if number not in attending),
        keys_from=tuple(
            layer.index if layer.source_of_keys is None else layer.source_of_keys
            for layer in layers
            if any(layer.shares_keys for layer in layers)
        ),
        parity={**errors},
    )


def as_loaded(
    given: Model | LoadedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> LoadedModel:
    """Return a model in memory with a tokenizer (by default the model's) and its description.

    Raises:
        UserError: for what is no model, or for a model that cannot be read, or that fails parity.
    """
    if isinstance(given, LoadedModel):
        return given if tokenizer is None else replace(given, tokenizer=tokenizer)
    tokenizer = tokenizer or getattr(given, "tokenizer", None)
    model, errors = as_hooked(given, tokenizer)
    info = describe(model, str(getattr(model.cfg, "model_name", "")), errors)
    hooked: Any = model
    return LoadedModel(model=hooked, tokenizer=tokenizer, info=info)


def error_of_tap(model: HookedModel) -> dict[str, float]:
    """Return the error of a model's last residual stream against TransformerLens's code."""
    vectors = torch.randn(2, 13, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    vectors = vectors.to(next(model.parameters()).dtype)
    with torch.inference_mode():
        expected = run_blocks(model, vectors)
        with tapped(model):
            output = relative_error(run_blocks(model, vectors).float(), expected.float())
    return {"output": output}


def position_dependence(model: HookedModel) -> float:
    """Return the change of a bridge's scores under permuted position ids, relative to the largest.

    The all-ones mask is passed explicitly. Without a mask, transformers takes unordered ids for
    packed sequences, and masks between them.
    """
    device = next(model.parameters()).device
    tokens = probe_tokens(model.cfg.d_vocab).to(device)
    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0)).to(device)

    def unmasked(layer: Layer, attention: Attention) -> Float[Tensor, "seq head cell"]:
        return attention.scores()[..., attention.visible_to_all].float()

    with torch.inference_mode(), evaluated(model), attention_read(model, unmasked) as scores:
        for ids in (order.sort()[0], order):
            all_seen = torch.ones_like(tokens)
            model(tokens, position_ids=ids[None].expand_as(tokens), attention_mask=all_seen)
    in_order, permuted = scores[: len(scores) // 2], scores[len(scores) // 2 :]
    changes = [relative_error(*pair) for pair in zip(permuted, in_order, strict=True)]
    return float(torch.tensor(changes).max())
