"""Whether a hooked model computes what plain transformers computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.hooks.layers.attention import Attention, relative_error, score_tolerance
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.passes import attention_read, evaluated, logits_of


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The outputs of plain transformers on the probe.

    Attributes:
        logits: the logits.
        patterns: the attention weights of each layer that returns them.
    """

    logits: Float[Tensor, "seq pos d_vocab"]
    patterns: tuple[Tensor, ...]


# Whose functions on a module, or in place of another, compute the same.
_CHECKERS = ("jaxtyping", "beartype")
_LIBRARIES = ("transformers", "torch", "nnsight", "nope_probe", "transformer_lens")


def probe_tokens(d_vocab: int) -> Int[Tensor, "seq pos"]:
    """Return the small batch of random tokens on which parity is measured."""
    return torch.randint(d_vocab, (2, 13), generator=torch.Generator().manual_seed(0))


_REASONS = {
    "logits": (
        "TransformerLens and transformers compute different outputs (a function of transformers "
        "that was replaced is dropped: change a model by a subclass, or by hooks)"
    ),
    "positions": "scores depend on positions otherwise than by RoPE or learned embeddings",
}


def probed(model: Any, *, with_patterns: bool = False) -> Reference:
    """Return the outputs of a plain model on the probe, without a trace in the model.

    Args:
        model: a model of transformers.
        with_patterns: whether eager attention returns its weights too. It hands masks of its own
            kind to a user's hooks.

    Raises:
        UserError: for a model that does not run on text alone, or whose outputs are NaN, naming a
            weight that is not finite, if one is.
    """
    tokens = probe_tokens(model.config.get_text_config().vocab_size).to(model.device)
    eager = torch.compiler.set_stance("force_eager")  # compiling takes longer than the pass
    size = f"{len(tokens)} sequences of {tokens.shape[1]} tokens"
    alone = reading(f"a {type(model).__name__} does not run on {size} of text alone")
    options = {"output_attentions": True} if with_patterns else {}
    with alone, torch.no_grad(), evaluated(model), eager:
        outputs = model(input_ids=tokens, use_cache=False, **options)
    logits = outputs.logits.float()
    if logits.isnan().any():
        validate_weights(model)
        raise UserError(
            f"the model's outputs are NaN in {str(model.dtype).removeprefix('torch.')}, with "
            "finite weights: load it in another dtype (dtype=torch.float32)"
        )
    # A state-space model has no attention weights.
    attentions = (getattr(outputs, "attentions", None) if with_patterns else None) or ()
    patterns = tuple(attention for attention in attentions if attention is not None)
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


def validate_functions(model: Any) -> None:
    """Check that attention and masks, which taps and masks of ours replace, are transformers'.

    The probe is a few tokens long, so that it would not see a window.

    Raises:
        UserError: naming the function that is the user's.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config.get_text_config()._attn_implementation
    for kind, functions in (
        ("attention", ALL_ATTENTION_FUNCTIONS),
        ("mask", ALL_MASK_ATTENTION_FUNCTIONS),
    ):
        function = functions.get(name)
        if function is not None and not is_of_a_library(function):
            raise UserError(
                f"the {kind} function {name!r} is {_home_of(function)}'s, and would be dropped: "
                "set_attn_implementation('eager') and change it in a subclass or by a hook"
            )


def is_of_a_library(function: Any) -> bool:
    """Return whether a function, whatever it wraps, is one of the libraries that models need."""
    return _home_of(function).split(".")[0] in _LIBRARIES


def _home_of(function: Any) -> str:
    """Return the module in which a function is written, whatever it wraps."""
    function = getattr(function, "func", function)  # of a partial
    function = getattr(function, "__func__", function)  # of a method
    names = getattr(function, "__globals__", None)
    home = str(names["__name__"] if names else getattr(function, "__module__", None) or "torch")
    # What checks types computes what it wraps.
    return _home_of(function.__wrapped__) if home.split(".")[0] in _CHECKERS else home


def validate_within(
    name: str, errors: Mapping[str, float], dtype: torch.dtype, layer: int | None = None
) -> None:
    """Check that the errors of a model are within the tolerance of its dtype.

    Args:
        name: the model's name.
        errors: by output.
        dtype: the model's.
        layer: the first layer whose attention is off, if it is known.

    Raises:
        UserError: naming the output that is off, its error, and the layer.
    """
    tolerance, since = score_tolerance(dtype), "" if layer is None else f", from L{layer} on"
    for output, value in errors.items():
        if not value <= tolerance:
            raise UserError(
                f"{name} fails parity: {output} off by {value:.2g} (relative), more than "
                f"{tolerance:g}{since}; {_REASONS.get(output, _REASONS['logits'])}"
            )


def errors_of(model: HookedModel, reference: Reference) -> dict[str, float]:
    """Return the relative errors of logits and attention weights against plain transformers.

    Raises:
        UserError: for an error beyond the tolerance, naming the first layer that is off where
            transformers returned attention weights.
    """

    def pattern(layer: Layer, attention: Attention) -> tuple[int, Tensor]:
        return layer.index, attention.pattern().float()

    with torch.inference_mode(), attention_read(model, pattern) as patterns:
        logits = logits_of(model, probe_tokens(model.cfg.d_vocab)).float()
    errors, layer = {"logits": relative_error(logits, reference.logits.to(logits.device))}, None
    dtype = next(model.parameters()).dtype
    if len(patterns) == len(reference.patterns):
        of_layers = {
            index: relative_error(pattern, expected.float().to(pattern.device))
            for (index, pattern), expected in zip(patterns, reference.patterns, strict=True)
        }
        # Python's max skips NaN.
        errors["pattern"] = float(torch.tensor([*of_layers.values()]).max())
        within = score_tolerance(dtype)
        layer = next((index for index in of_layers if not of_layers[index] <= within), None)
    validate_within(str(getattr(model.cfg, "model_name", "")), errors, dtype, layer)
    return errors
