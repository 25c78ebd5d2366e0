"""How far the package's maps of a tiny decoder are from plain transformers', intact and ablated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.plain_attention import (
    PlainAttention,
    blocks_of,
    components_of,
    plain_attention,
)
from support.tiny_models import Tiny
from torch import Tensor, nn

from nope_probe import Ablation, ablated, capture_scores

PROJECTIONS = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "o_proj"}


def removals_of(tiny: Tiny) -> list[str]:
    """Return what is measured of a decoder: `intact`, sources and projections that it has.

    A projection counts if each block that attends has it as a matrix of its own, and if plain
    transformers runs with an identity in its place: a norm over all key heads at once does not.
    A model without attention has no removals.
    """
    sources = components_of(tiny.hf, tiny.tokens)
    attention = plain_attention(tiny.hf, tiny.tokens)
    projections = [name for name in PROJECTIONS if _is_editable(tiny, attention, name)]
    return ["intact", *sources, *projections] if sources else []


def _is_editable(tiny: Tiny, attention: dict[int, PlainAttention], name: str) -> bool:
    for layer, recorded in attention.items():
        matrix = _projections(tiny, layer).get(name)
        if matrix is None or recorded.q is None:
            return False
        width = recorded.q.shape[1] * recorded.q.shape[-1]
        if name == "w_q" and matrix.out_features != width:  # with gates, as Qwen3-Next's
            return False
    try:
        with _identities(tiny, name):
            plain_attention(tiny.hf, tiny.tokens)
    except RuntimeError:
        return False
    return True


def map_error(model: Any, tiny: Tiny, removal: str) -> float:
    """Return the largest difference of a layer's map, relative to the map's largest score.

    The difference is infinite where other cells are visible than in plain transformers.
    """
    if removal in PROJECTIONS:
        with _identities(tiny, removal):
            plain = plain_attention(tiny.hf, tiny.tokens)
    else:
        plain = plain_attention(tiny.hf, tiny.tokens, without=removal)
    names = [] if removal == "intact" else removal.split(" and ")
    with ablated(model, Ablation(remove=names, replacement="identity", gain="identity")):
        maps = capture_scores(model, tiny.tokens, layers=list(plain)).mean
    errors = []
    for measured, attention in zip(maps, plain.values(), strict=True):
        same_cells = measured.isnan().equal(attention.map.isnan())
        difference = (measured - attention.map).abs().nan_to_num()
        error = float(difference.max() / attention.map.nan_to_num().abs().max())
        errors.append(error if same_cells else torch.inf)
    return max(errors)


@contextmanager
def _identities(tiny: Tiny, removal: str) -> Iterator[None]:
    """Put an identity in the place of a projection, with a key or value head per query head."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for layer, recorded in plain_attention(tiny.hf, tiny.tokens).items():
            matrix = _projections(tiny, layer)[removal]
            n_heads, n_key_heads = recorded.scores.shape[1], recorded.k.shape[1]
            ungrouped = n_heads // n_key_heads if removal in ("w_k", "w_v") else 1
            rows, columns = matrix.out_features * ungrouped, matrix.in_features
            identity = _identity(columns, rows).T if removal == "w_o" else _identity(rows, columns)
            parent = next(each for each in tiny.hf.modules() if matrix in each.children())
            edited = nn.Linear(columns, rows, bias=False)
            edited.weight = nn.Parameter(identity, requires_grad=False)
            monkeypatch.setitem(parent._modules, PROJECTIONS[removal], edited)
        yield


def _identity(rows: int, columns: int) -> Tensor:
    """Return the matrix whose row r reads coordinate r % columns."""
    return torch.eye(columns)[torch.arange(rows) % columns]


def _projections(tiny: Tiny, layer: int) -> dict[str, Any]:
    """Return a block's projections that are one matrix each."""
    modules = dict(blocks_of(tiny.hf)[layer].named_modules())
    return {
        name: module
        for name, ending in PROJECTIONS.items()
        for path, module in modules.items()
        if path.rpartition(".")[2] == ending and isinstance(module, nn.Linear)
    }
