"""Describe a model in memory, and measure its parity with plain transformers.

A model whose outputs differ from plain transformers' is refused at load, because no measurement on
it would hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import Attention, relative_error, score_tolerance
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import (
    as_evaluated,
    attention_read,
    blocks_of,
    layers_of,
    logits_of,
    position_point,
    run_blocks,
    takes_position_ids,
    tapped,
)
from nope_probe.hooks.removing.components import rope_layers
from nope_probe.models.info import GGUFInfo, ModelInfo


def describe(
    model: HookedModel,
    name: str,
    source: str = "configuration",
    architecture: str | None = None,
    revision: str | None = None,
    gguf: GGUFInfo | None = None,
    depth: int | None = None,
) -> ModelInfo:
    """Return a model's info, without the parity that `check_parity` measures.

    By default, the architecture is the class of the hooked model, or of the model in its bridge.
    """
    layers = layers_of(model)
    return ModelInfo(
        name=name,
        source=source,
        revision=revision,
        gguf=gguf,
        architecture=architecture or type(getattr(model, "original_model", model)).__name__,
        kind=layers[0].kind,
        n_layers=len(blocks_of(model)),
        depth=depth or len(blocks_of(model)),
        n_heads=layers[0].n_heads,
        n_kv_heads=layers[0].n_kv_heads,
        d_head=layers[0].d_head,
        d_model=layers[0].d_model,
        n_ctx=model.cfg.n_ctx,
        d_vocab=model.cfg.d_vocab,
        rope_layers=rope_layers(model),
        not_attending=tuple(
            sorted({*range(len(blocks_of(model)))} - {layer.index for layer in layers})
        ),
    )


_REASONS = {
    "logits": "TransformerLens and transformers compute different outputs",
    "positions": "scores depend on positions otherwise than by RoPE or learned embeddings",
}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The outputs of plain transformers on the probe.

    Attributes:
        logits: the logits.
        patterns: the attention weights of each layer that returns them.
    """

    logits: Float[Tensor, "seq pos d_vocab"]
    patterns: tuple[Tensor, ...]


def probe_tokens(d_vocab: int) -> Int[Tensor, "seq pos"]:
    """Return the small batch of random tokens on which parity is measured."""
    return torch.randint(d_vocab, (2, 13), generator=torch.Generator().manual_seed(0))


def check_parity(
    model: HookedModel, info: ModelInfo, reference: Reference | None = None
) -> ModelInfo:
    """Check that a model's outputs equal plain transformers', and return its info with parity.

    Args:
        model: the hooked model.
        info: its info, without parity.
        reference: plain transformers' outputs, if transformers has the model.

    Raises:
        UserError: naming the output that is off, and its error.
    """
    parity: dict[str, float] = {}
    if reference is not None:
        parity |= _errors(model, info, reference)
    else:
        parity["output"] = _error_of_tap(model, info)
    has_positions = any(info.rope_layers) or position_point(model) is not None
    if takes_position_ids(model) and not has_positions:
        parity["positions"] = position_dependence(model)
    tolerance = score_tolerance(next(model.parameters()).dtype)
    for name, value in parity.items():
        if not value <= tolerance:
            raise UserError(
                f"{info.name} fails parity: {name} off by {value:.2g} (relative), more than "
                f"{tolerance:g}; {_REASONS.get(name, _REASONS['logits'])}"
            )
    return replace(info, parity=parity)


def _errors(model: HookedModel, info: ModelInfo, reference: Reference) -> dict[str, float]:
    """Return the errors of logits and attention weights against plain transformers."""

    def pattern(layer: Layer, attention: Attention) -> Tensor:
        return attention.pattern().float()

    with torch.inference_mode(), attention_read(model, pattern) as patterns:
        logits = logits_of(model, probe_tokens(info.d_vocab)).float()
    errors = {"logits": relative_error(logits, reference.logits.to(logits.device))}
    if len(patterns) == len(reference.patterns):
        of_patterns = [
            relative_error(pattern, expected.float().to(pattern.device))
            for pattern, expected in zip(patterns, reference.patterns, strict=True)
        ]
        errors["pattern"] = float(torch.tensor(of_patterns).max())  # Python's max skips NaN
    return errors


def _error_of_tap(model: HookedModel, info: ModelInfo) -> float:
    """Return the error of a model's last residual stream against TransformerLens's own code."""
    vectors = torch.randn(2, 13, info.d_model, generator=torch.Generator().manual_seed(0))
    vectors = vectors.to(next(model.parameters()).dtype)
    with torch.inference_mode():
        own = run_blocks(model, vectors)
        with tapped(model):
            return relative_error(run_blocks(model, vectors).float(), own.float())


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

    with torch.inference_mode(), as_evaluated(model), attention_read(model, unmasked) as scores:
        for ids in (order.sort()[0], order):
            all_seen = torch.ones_like(tokens)
            model(tokens, position_ids=ids[None].expand_as(tokens), attention_mask=all_seen)
    in_order, permuted = scores[: len(scores) // 2], scores[len(scores) // 2 :]
    changes = [relative_error(*pair) for pair in zip(permuted, in_order, strict=True)]
    return float(torch.tensor(changes).max())
