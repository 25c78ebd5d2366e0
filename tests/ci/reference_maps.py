"""Maps of one saved file of inputs, which are to be the same with every TransformerLens.

`reference/inputs.safetensors` holds token sequences of the shipped held-out text and normal
vectors, `reference/maps.safetensors` the maps that TransformerLens 3.9 gave.
`benchmarks/versions.py` writes such a file, and compares two.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nope_probe import (
    Ablation,
    ablated,
    build,
    calibrate,
    capture_scores,
    capture_stages,
    load,
    parameter_free,
)
from nope_probe.hooks.removing.components import components

FOLDER = Path(__file__).parent / "reference"
INPUTS, MAPS = FOLDER / "inputs.safetensors", FOLDER / "maps.safetensors"
TRAINED = ("nope-tiny", "rope-tiny")
VARIANTS: dict[str, dict[str, Any]] = {
    "l2": {},
    "l2-rope": {"rope": True},
    "l2-encoder": {"causal": False},
    "layernorm-sqrt-d": {"norm": "layernorm-sqrt-d"},
    "layernorm-d-rope": {"norm": "layernorm-d", "rope": True},
    "layernorm-d-encoder": {"norm": "layernorm-d", "causal": False},
}


def reference_maps() -> dict[str, Tensor]:
    """Compute every map, in float32, by its name."""
    inputs = load_file(INPUTS)
    result = [*_trained(inputs["tokens"].long()), *_parameter_free(inputs["vectors"])]
    return {name: tensor.float().contiguous() for name, tensor in result}


def _trained(tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name in TRAINED:
        model = load(name).model
        maps = capture_scores(model, tokens, n_folds=3, per_head=True)
        yield f"{name}/folds", maps.folds
        yield f"{name}/per_head", maps.per_head.mean(0)
        gains = calibrate(model, tokens)
        for remove in (
            *((component,) for component in components(model)),
            ("mask", "w_q", "w_k", "w_v"),
        ):
            with ablated(model, Ablation(remove=remove, replacement="identity"), gains):
                kept = capture_scores(model, tokens, n_folds=3)
            yield f"{name}/without {' '.join(remove)}", kept.mean
        yield from _stages(f"{name}/stage", model, tokens)


def _parameter_free(vectors: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, options in VARIANTS.items():
        model = build(parameter_free(n_layers=3, d_model=vectors.shape[-1], **options))
        maps = capture_scores(model, vectors, n_folds=3)
        yield f"{name}/scores", maps.mean
        yield from _stages(f"{name}/stage", model, vectors)
    with ablated(model, Ablation(remove=["w_q", "w_v"], replacement="identity", gain="identity")):
        yield f"{name}/without w_q w_v", capture_scores(model, vectors, n_folds=3).mean


def _stages(prefix: str, model: Any, inputs: Tensor) -> Iterator[tuple[str, Tensor]]:
    maps = capture_stages(model, inputs, layer=1, n_folds=3)
    for letter in maps.folds:
        yield f"{prefix} {letter}", maps.mean(letter)


def differences(actual: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return each map's largest relative difference, inf where other cells are NaN."""
    if set(actual) != set(theirs):
        raise ValueError(f"only one of the two has {sorted(set(actual) ^ set(theirs))}")
    return {name: _difference(actual[name], theirs[name]) for name in actual}


def _difference(values: Tensor, expected: Tensor) -> float:
    if not torch.equal(values.isnan(), expected.isnan()):
        return float("inf")
    values, expected = values.nan_to_num(), expected.nan_to_num()
    return float((values - expected).abs().max() / expected.abs().max())
