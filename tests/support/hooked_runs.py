"""Run a hooked model as plain transformers runs, or as if memory ran out."""

from typing import Any

import torch
from support.edited_model import Outputs
from support.tiny_models import distance

from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of


def hooked_run(model: Any, tokens: torch.Tensor) -> Outputs:
    """Return a hooked model's logits, and the softmax of the scores that its hook points carry."""
    patterns: list[torch.Tensor] = []

    def keep(scores: torch.Tensor, hook: object) -> None:
        patterns.append(scores.softmax(-1))

    points = [(layer.point("attn.hook_attn_scores"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(points):
        logits = model(tokens)
    return Outputs(logits, torch.stack(patterns))


GREEDY = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}


def by_whole_passes(model: Any, prompt: torch.Tensor, n_new: int) -> torch.Tensor:
    """Return a prompt and the most likely tokens after it, each from a pass of all before it."""
    for _ in range(n_new):
        with torch.inference_mode():
            best = model(prompt)[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat((prompt, best), 1)
    return prompt


def largest_error(outputs: Outputs, expected: Outputs) -> float:
    """Return the larger relative error of logits and patterns."""
    return max(
        distance(outputs.logits, expected.logits), distance(outputs.patterns, expected.patterns)
    )


def hooks_left(model: Any) -> list[str]:
    """Return the names of the hook points that have hooks."""
    return [n for n, point in model.named_modules() if getattr(point, "fwd_hooks", None)]


def out_of_memory_above(size: int, model: Any, layer: int) -> Any:
    """Run a model as if one layer ran out of memory on more than `size` sequences."""

    def refuse(tensor: torch.Tensor, hook: object) -> None:
        if len(tensor) > size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return hooks_attached([(layers_of(model)[layer].point("hook_resid_post"), refuse)])
