"""Ablations that Hypothesis draws, and the plain model that each of them equals."""

from functools import cache
from itertools import groupby
from math import pi
from typing import Any

import torch
from einops import rearrange
from hypothesis import strategies as st
from support.edited_model import (
    WEIGHTS,
    Replaced,
    attention_inputs,
    constants,
    edited,
    norm_sizes,
    output_sizes,
    projections,
    rows_of,
    scaled_identities,
    ungrouped,
)
from support.plain_attention import blocks_of
from support.tiny_models import Tiny
from torch import Tensor
from transformers import PreTrainedModel

from nope_probe import Ablation, Calibration, calibrate
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import REPLACEMENTS, WITH_GAIN
from nope_probe.hooks.removing.weights import Place

PER_HEAD = {"mask", "window", "rope", *WEIGHTS}
GAINS = ("output", "norm", "identity")


@cache
def calibration_of(model: Any, tiny: Tiny, seed: int) -> Calibration:
    return calibrate(model, tiny.tokens, batch_size=2, seed=seed)


def own_weight(weight: Tensor, place: Place) -> Tensor:
    """Return a weight of a size of its own, drawn for its place."""
    return 0.3 * torch.randn(weight.shape, generator=place.generator)


@st.composite
def ablations(draw: st.DrawFn, model: Any, tiny: Tiny, n_pos: int | None = None) -> Ablation:
    """Draw some of a model's components, in any order and place, and what weights become.

    A prefix has n_pos positions at most, by default as many as the tiny model's tokens.
    """
    n_pos = n_pos or tiny.tokens.shape[1]
    kind = draw(st.sampled_from(("everywhere", "layers", "heads")))
    has = [*components(model), "norms"]
    if kind == "heads":
        has = [name for name in has if name in PER_HEAD]
    names: list[str] = draw(st.lists(st.sampled_from(has), unique=True))
    has_mask = "mask" in names
    if "rope" in names:
        names[names.index("rope")] = draw(st.sampled_from(("rope", "bands", *rope_halves(tiny))))
    if "bands" in names:
        at, pairs = names.index("bands"), range(len(rotary_angles(tiny)))
        names[at : at + 1] = bands(draw(st.sets(st.sampled_from(pairs), min_size=1)))
    layer = st.sampled_from(range(len(blocks_of(tiny.hf))))
    heads = st.lists(st.sampled_from(range(n_heads(tiny.hf))), unique=True)
    replacement = draw(st.sampled_from((*REPLACEMENTS, own_weight)))
    return Ablation(
        remove=names,
        layers=draw(st.lists(layer, unique=True)) if kind == "layers" else None,
        heads=draw(st.dictionaries(layer, heads, min_size=1)) if kind == "heads" else None,
        replacement=replacement,
        gain=draw(st.sampled_from(GAINS)) if replacement in WITH_GAIN else None,
        seed=draw(st.sampled_from((0, 3))),
        prefix=draw(st.none() | st.integers(1, n_pos)) if has_mask else None,
    )


def identities(*names: str) -> Ablation:
    """Return the removal of components; weights become identities, which need no calibration."""
    return Ablation(remove=names, replacement="identity", gain="norm")


def n_heads(hf: PreTrainedModel) -> int:
    return hf.config.num_attention_heads


def rotary_angles(tiny: Tiny) -> Tensor:
    """Return the angle per position of each rotary pair."""
    return tiny.hf.model.rotary_emb.inv_freq


def rope_halves(tiny: Tiny) -> dict[str, list[int]]:
    """Return the rotary pairs that turn within a model's tokens, and those that do not."""
    turns = (2 * pi / rotary_angles(tiny) < tiny.tokens.shape[1]).tolist()
    high = [pair for pair, is_high in enumerate(turns) if is_high]
    return {"rope_high": high, "rope_low": [pair for pair in range(len(turns)) if pair not in high]}


def bands(pairs: set[int]) -> list[str]:
    """Return the bands of neighbouring pairs.

    Example:
        >>> bands({0, 1, 3})
        ['rope[0:2]', 'rope[3:4]']
    """
    runs = groupby(enumerate(sorted(pairs)), lambda item: item[1] - item[0])
    together = [[pair for _, pair in run] for _, run in runs]
    return [f"rope[{run[0]}:{run[-1] + 1}]" for run in together]


def edited_as(ablation: Ablation, model: Any, tiny: Tiny) -> PreTrainedModel:
    """Return the plain model that an ablation says in words."""
    hf = tiny.hf
    names = {"rope" if name.startswith("rope") else name for name in ablation.remove}
    pairs = pairs_of([name for name in ablation.remove if name.startswith("rope")], tiny)
    layers = range(len(blocks_of(hf))) if ablation.layers is None else ablation.layers
    where = dict.fromkeys(layers) if ablation.heads is None else dict(ablation.heads)
    every = {*range(n_heads(hf))}
    where = {
        at: None if heads is None or {*heads} == every else heads for at, heads in where.items()
    }
    weights = replaced_weights(ablation.replacement, ablation.gain, ablation.seed, model, tiny)
    plain = edited(hf, names, None, where, prefix=ablation.prefix, replaced=weights, pairs=pairs)
    if ablation.replacement == "mean" and "w_o" in names:
        for layer, heads in where.items():
            if heads:
                projections(plain, layer)["w_o"].bias.add_(mean_of_heads(hf, tiny, layer, heads))
    return plain


def pairs_of(removed: list[str], tiny: Tiny) -> list[int] | None:
    """Return the rotary pairs that bands and halves name; None for all."""
    if not removed or "rope" in removed:
        return None
    pairs: list[int] = []
    for name in removed:
        if name in ("rope_high", "rope_low"):
            pairs += rope_halves(tiny)[name]
        else:
            start, stop = name.removeprefix("rope[").removesuffix("]").split(":")
            pairs += range(int(start), int(stop))
    return pairs


def mean_of_heads(hf: PreTrainedModel, tiny: Tiny, layer: int, heads: Any) -> Tensor:
    """Return the mean of what heads add to the output of W_O in the intact model."""
    weight, rows = projections(ungrouped(hf), layer)["w_o"].weight, rows_of(heads, hf, layer)
    return attention_inputs(hf, tiny.tokens)[layer][1][..., rows].mean((0, 1)) @ weight[:, rows].T


@cache
def replaced_weights(kind: Any, gain: str | None, seed: int, model: Any, tiny: Tiny) -> Replaced:
    """Return what each projection is replaced by, from plain tensors.

    The random matrices are those that were drawn for the model: what they have to be is in
    tests/hooks/removing/test_replacements.py.
    """
    hf, copied = tiny.hf, ungrouped(tiny.hf)
    measured = {"norm": norm_sizes, "output": lambda hf: output_sizes(hf, tiny.tokens)}
    if kind == "identity":
        return scaled_identities(copied, measured[gain](hf) if gain in measured else None)
    if kind == "mean":
        return constants(hf, tiny.tokens)
    shapes = {
        (name, layer): weight.shape
        for layer in range(len(blocks_of(hf)))
        for name, (weight, _) in projections(copied, layer).items()
    }
    if kind == "zero":
        return {key: (torch.zeros(s), torch.zeros(s[0])) for key, s in shapes.items()}
    draw = random_matrix if kind == "random" else own_matrix
    drawn = {(name, layer): draw(model, name, layer, seed) for name, layer in shapes}
    measured["output"] = lambda hf: output_sizes(hf, tiny.tokens, lambda *key: drawn[key])
    sizes = measured[gain](hf) if gain in measured else dict.fromkeys(drawn, 1.0)
    return {key: (sizes[key] * r, torch.zeros(len(r))) for key, r in drawn.items()}


def random_matrix(model: Any, name: Any, layer: int, seed: int = 0) -> Tensor:
    """Return R as [out, in]."""
    place = Place(layer=layers_of(model)[layer], name=name, ablation=Ablation(seed=seed))
    rows = rearrange(place.random_rows(), "head h m -> (head h) m")
    return rows.T if name == "w_o" else rows


def own_matrix(model: Any, name: Any, layer: int, seed: int = 0) -> Tensor:
    """Return `own_weight` as [out, in], with one key and value head per query head."""
    block = layers_of(model)[layer]
    place = Place(layer=block, name=name, ablation=Ablation(seed=seed))
    new = own_weight(block.weight_per_head(name), place)
    if name == "w_o":
        return rearrange(new, "head h m -> m (head h)")
    new = new.repeat_interleave(block.n_heads // len(new), 0)
    return rearrange(new, "head m h -> (head h) m")
