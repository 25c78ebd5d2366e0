"""The replacement of one projection, from the settings of an ablation and a calibration."""

from __future__ import annotations

import torch

from nope_probe.components import Ablation, Projection
from nope_probe.hooks.base_layer import Layer
from nope_probe.hooks.calibration import Calibration, mean_output, mean_output_per_head
from nope_probe.hooks.replacements import (
    ConstantWeight,
    IdentityWeight,
    RandomWeight,
    ReplacedWeight,
    norm_gain,
    random_rows,
)


def replaced_weight(
    layer: Layer,
    name: Projection,
    ablation: Ablation,
    calibration: Calibration | None,
    heads: list[int] | None = None,
) -> ReplacedWeight:
    """Return the replacement of one projection in one block.

    Args:
        layer: the block.
        name: the projection.
        ablation: which replacement, of which gain.
        calibration: what `calibrate` measured, where `ablation.needs_calibration`.
        heads: the query heads that lose it; None for all.
    """
    if ablation.replacement == "zero":
        return ConstantWeight(torch.zeros(layer.n_heads, layer.width(name)))
    if ablation.replacement == "mean":
        assert calibration is not None, "the mean output is measured first"
        if name == "w_o" and heads is not None:
            return ConstantWeight(mean_output_per_head(layer, calibration))
        return ConstantWeight(mean_output(layer, name, calibration))
    c = _gain(layer, name, ablation, calibration)
    if ablation.replacement == "random":
        return RandomWeight(random_rows(layer, name, ablation.seed), c)
    return IdentityWeight(layer, c)


def _gain(
    layer: Layer, name: Projection, ablation: Ablation, calibration: Calibration | None
) -> float:
    if ablation.gain == "norm":
        return norm_gain(layer, name)
    if ablation.gain == "identity":
        return 1.0
    assert calibration is not None, "the gain `output` is measured first"
    is_random = ablation.replacement == "random"
    return (calibration.of_random if is_random else calibration.of)(name, layer.index)
