"""Describe a model in memory, and measure its parity with plain transformers.

A model whose outputs differ from plain transformers' is refused at load, because no measurement on
it would hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nope_probe.hooks.layers.attention import Attention, relative_error
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import (
    blocks_of,
    layers_of,
    position_point,
    takes_position_ids,
    tapped,
)
from nope_probe.hooks.layers.objects import Model, as_hooked
from nope_probe.hooks.layers.parity import probe_tokens, validate_within
from nope_probe.hooks.layers.passes import attention_read, evaluated, run_blocks, traits_of
from nope_probe.models.info import LoadedModel, ModelInfo


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
