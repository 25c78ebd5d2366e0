"""Run a hooked model for the outputs that plain transformers gives too."""

from collections.abc import Iterable
from typing import Any

import torch
from support.edited_model import Outputs, plain_run
from support.tiny_models import distance
from transformers import PreTrainedModel

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.attached_hooks import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.replacements import Calibration


def hooked_run(model: Any, tokens: torch.Tensor) -> Outputs:
    """Return a hooked model's logits, and the softmax of the scores that its hook points carry."""
    patterns: list[torch.Tensor] = []

    def keep(scores: torch.Tensor, hook: object) -> None:
        patterns.append(scores.softmax(-1))

    points = [(layer.point("attn.hook_attn_scores"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(points):
        logits = model(tokens)
    return Outputs(logits, torch.stack(patterns))


def largest_error(outputs: Outputs, expected: Outputs) -> float:
    """Return the larger relative error of logits and patterns."""
    return max(
        distance(outputs.logits, expected.logits), distance(outputs.patterns, expected.patterns)
    )


def errors_above(
    bound: float,
    model: Any,
    tokens: torch.Tensor,
    cases: Iterable[tuple[Ablation, PreTrainedModel]],
    calibration: Calibration | None = None,
) -> dict[str, float]:
    """Return the ablations that differ from an edited model by more than a bound, and how much."""
    errors = {}
    for ablation, plain in cases:
        with ablated(model, ablation, calibration):
            outputs = hooked_run(model, tokens)
        errors[repr(ablation)] = largest_error(outputs, plain_run(plain, tokens))
    return {ablation: error for ablation, error in errors.items() if not error <= bound}


def hooks_left(model: Any) -> list[str]:
    """Return the names of the hook points that have hooks."""
    return [n for n, point in model.named_modules() if getattr(point, "fwd_hooks", None)]
