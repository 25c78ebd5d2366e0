"""Whether a hooked model computes what plain transformers computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import Attention, relative_error, score_tolerance
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import attention_read, evaluated, logits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


_REASONS = {
    "logits": "TransformerLens and transformers compute different outputs",
    "positions": "scores depend on positions otherwise than by RoPE or learned embeddings",
}


def reference_of(
    hf: PreTrainedModel,
    logits: Float[Tensor, "seq pos d_vocab"] | None = None,
    *,
    with_patterns: bool = True,
) -> Reference:
    """Return plain transformers' outputs on the probe, before a bridge rewires the model.

    Args:
        hf: the model.
        logits: of the model that it is a copy of; by default those of `hf`.
        with_patterns: whether to run eager attention, which returns its weights. It hands masks of
            its own kind to a user's hooks.
    """
    patterns: tuple[Tensor, ...] = ()
    if with_patterns or logits is None:
        tokens = probe_tokens(hf.config.vocab_size).to(hf.device)
        with torch.inference_mode(), evaluated(hf.modules()):
            outputs = hf(tokens, output_attentions=True, use_cache=False)
        attentions = getattr(outputs, "attentions", None) or ()  # a state-space model has none
        patterns = tuple(attention for attention in attentions if attention is not None)
        logits = outputs.logits.float() if logits is None else logits
    _validate_finite(hf, logits)
    return Reference(logits=logits, patterns=patterns)


def validate_weights(model: nn.Module) -> None:
    """Check that the weights of a model are numbers.

    Raises:
        UserError: naming a weight that holds NaN or infinite numbers.
    """
    for name, weight in model.named_parameters():
        numbers = weight.detach()
        is_float = numbers.is_floating_point()
        if is_float and not numbers.sum().isfinite() and not numbers.isfinite().all():
            raise UserError(f"the weight {name} holds NaN or infinite numbers: the model is broken")


def _validate_finite(hf: PreTrainedModel, logits: Float[Tensor, "seq pos d_vocab"]) -> None:
    """Check that plain transformers' outputs are numbers.

    Raises:
        UserError: naming a weight that is not finite, if one is.
    """
    if not logits.isnan().any():
        return
    validate_weights(hf)
    raise UserError(
        f"the model's outputs are NaN in {str(hf.dtype).removeprefix('torch.')}, with finite "
        "weights: load it in another dtype (dtype=torch.float32)"
    )


def validate_surroundings() -> None:
    """Check that no context around a call changes what models compute.

    Raises:
        UserError: naming the context.
    """
    if torch.get_default_device().type == "meta":
        raise UserError(
            "inside torch.device('meta') tensors have no numbers: call nope_probe outside of it"
        )
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if kinds:
        raise UserError(
            f"inside torch.autocast ({kinds[0]}) products are rounded to another dtype: call "
            "nope_probe outside of it, and load the model in that dtype (dtype=torch.bfloat16)"
        )


def validate_within(name: str, errors: Mapping[str, float], dtype: torch.dtype) -> None:
    """Check that the errors of a model are within the tolerance of its dtype.

    Raises:
        UserError: naming the output that is off, and its error.
    """
    tolerance = score_tolerance(dtype)
    for output, value in errors.items():
        if not value <= tolerance:
            raise UserError(
                f"{name} fails parity: {output} off by {value:.2g} (relative), more than "
                f"{tolerance:g}; {_REASONS.get(output, _REASONS['logits'])}"
            )


def errors_of(model: HookedModel, reference: Reference) -> dict[str, float]:
    """Return the relative errors of logits and attention weights against plain transformers."""

    def pattern(layer: Layer, attention: Attention) -> Tensor:
        return attention.pattern().float()

    with torch.inference_mode(), attention_read(model, pattern) as patterns:
        logits = logits_of(model, probe_tokens(model.cfg.d_vocab)).float()
    errors = {"logits": relative_error(logits, reference.logits.to(logits.device))}
    if not patterns:
        kind = type(layers_of(model)[0].attending).__name__
        raise UserError(
            f"{kind} does not attend through transformers' AttentionInterface, so that there are "
            "no q and k to read: write its forward with ALL_ATTENTION_FUNCTIONS, as transformers' "
            "models have it"
        )
    if len(patterns) == len(reference.patterns):
        of_patterns = [
            relative_error(pattern, expected.float().to(pattern.device))
            for pattern, expected in zip(patterns, reference.patterns, strict=True)
        ]
        errors["pattern"] = float(torch.tensor(of_patterns).max())  # Python's max skips NaN
    return errors
