"""Run a hooked model for what plain transformers gives too."""

from typing import Any

import torch
from support.edited_model import Seen
from support.tiny_models import distance

from nope_probe.hooks.forward import hooks_attached
from nope_probe.hooks.layer import layers_of


def hooked_run(model: Any, tokens: torch.Tensor) -> Seen:
    """Run a hooked model for its logits, and the softmax of the scores that it hands out."""
    patterns: list[torch.Tensor] = []

    def keep(scores: torch.Tensor, hook: object) -> None:
        patterns.append(scores.softmax(-1))

    points = [(layer.point("attn.hook_attn_scores"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(points):
        logits = model(tokens)
    return Seen(logits, torch.stack(patterns))


def worst(seen: Seen, truth: Seen) -> float:
    return max(distance(seen.logits, truth.logits), distance(seen.patterns, truth.patterns))
