"""Run a hooked model as plain transformers runs, and work out replacements from plain tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from einops import rearrange
from support.edited_model import (
    Outputs,
    Replaced,
    edited,
    output_means,
    output_sizes,
    plain_run,
    projections,
    scaled_identities,
    ungrouped,
)
from support.rounding import NETWORK
from support.tiny_models import distance
from torch import Tensor
from transformers import PreTrainedModel

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.replacements import Calibration, random_rows


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


def replacement_errors(
    model: Any, tiny: Any, replacement: Any, removals: list[tuple[Any, ...]]
) -> dict[str, float]:
    """Return removals that differ from edited models by more than `NETWORK`, and their errors."""
    weights = replaced_weights(replacement, model, tiny.hf, tiny.tokens)
    cases = (
        (
            Ablation(remove=remove, replacement=replacement),
            edited(tiny.hf, remove, replaced=weights),
        )
        for remove in removals
        if {*remove} <= {*components(model)} - {"pos_embed"}
    )
    return errors_above(NETWORK, model, tiny.tokens, cases, calibrate(model, tiny.tokens, seed=0))


def hooks_left(model: Any) -> list[str]:
    """Return the names of the hook points that have hooks."""
    return [n for n, point in model.named_modules() if getattr(point, "fwd_hooks", None)]


def replaced_weights(
    kind: str, model: Any, hf: PreTrainedModel, tokens: Tensor, seed: int = 0
) -> Replaced:
    """Return what each projection is replaced by, at the gain `output`.

    The random matrices are those that were drawn for the model: what they have to be is in
    tests/hooks/removing/test_replacements.py.
    """
    copied = ungrouped(hf)
    if kind == "identity":
        return scaled_identities(copied, output_sizes(hf, tokens))
    means = output_means(hf, tokens)
    shapes = {
        (name, layer): weight.shape
        for layer in range(len(layers_of(model)))
        for name, (weight, _) in projections(copied, layer).items()
    }
    if kind == "mean":
        return {key: (torch.zeros(shape), means[key]) for key, shape in shapes.items()}
    if kind == "zero":
        return {key: (torch.zeros(s), torch.zeros(s[0])) for key, s in shapes.items()}
    drawn = {(name, layer): random_matrix(model, name, layer, seed) for name, layer in shapes}
    sizes = output_sizes(hf, tokens, lambda name, layer: drawn[name, layer])
    return {key: (sizes[key] * r, torch.zeros(len(r))) for key, r in drawn.items()}


def random_matrix(model: Any, name: Any, layer: int, seed: int = 0) -> Tensor:
    """Return R as [out, in]."""
    rows = rearrange(random_rows(layers_of(model)[layer], name, seed), "n h m -> (n h) m")
    return rows.T if name == "w_o" else rows
