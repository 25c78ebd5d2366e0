"""How far the package's maps of a tiny decoder are from plain transformers', intact and ablated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.plain_attention import PlainAttention, blocks_of, components_of, plain_attention
from support.tiny_models import Tiny
from torch import Tensor, nn

from nope_probe import Ablation, ablated, capture_scores

PROJECTIONS = {
    "w_q": ("q_proj",),
    "w_k": ("k_proj",),
    "w_v": ("v_proj",),
    "w_o": ("o_proj", "out_proj", "dense"),
}


def removals_of(tiny: Tiny) -> list[str]:
    """Return what is measured of a decoder: `intact`, and the components that can be taken away.

    A projection counts if each block that attends has it as a matrix of its own, and if plain
    transformers runs with an identity in its place: a norm over all key heads at once does not.
    MLPs count where each block has one module for them. A model without attention has no removals.
    """
    sources = components_of(tiny.hf, tiny.tokens)
    attention = plain_attention(tiny.hf, tiny.tokens)
    names = ["intact", *sources] if sources else []
    names += [name for name in PROJECTIONS if sources and _is_editable(tiny, attention, name)]
    blocks = blocks_of(tiny.hf)
    return [*names, "mlp"] if sources and len(blocks) == len(_mlps(tiny)) else names


def _is_editable(tiny: Tiny, attention: dict[int, PlainAttention], name: str) -> bool:
    for layer, recorded in attention.items():
        matrix = _projection(tiny, layer, name)
        if matrix is None:
            return False
        width = 0 if recorded.q is None else recorded.q.shape[1] * recorded.q.shape[-1]
        if name == "w_q" and width not in (0, matrix.out_features):  # Qwen3-Next's has gates too
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
    edits = {"mlp": zero_mlps(tiny)} | {name: _identities(tiny, name) for name in PROJECTIONS}
    with edits.get(removal, nullcontext()):
        without = None if removal in edits else removal
        plain = plain_attention(tiny.hf, tiny.tokens, without=without)
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
def _identities(tiny: Tiny, name: str) -> Iterator[None]:
    """Put an identity in the place of a projection, with a key or value head per query head."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for layer, recorded in plain_attention(tiny.hf, tiny.tokens).items():
            matrix = _projection(tiny, layer, name)
            is_grouped = name in ("w_k", "w_v") and recorded.k is not None
            group = recorded.scores.shape[1] // recorded.k.shape[1] if is_grouped else 1
            rows, columns = matrix.out_features * group, matrix.in_features
            identity = _identity(columns, rows).T if name == "w_o" else _identity(rows, columns)
            edited = nn.Linear(columns, rows, bias=False)
            edited.weight = nn.Parameter(identity, requires_grad=False)
            parent = next(module for module in tiny.hf.modules() if matrix in module.children())
            key = next(key for key, child in parent.named_children() if child is matrix)
            monkeypatch.setitem(parent._modules, key, edited)
        yield


def _identity(rows: int, columns: int) -> Tensor:
    """Return the matrix whose row r reads coordinate r % columns."""
    return torch.eye(columns)[torch.arange(rows) % columns]


def _projection(tiny: Tiny, layer: int, name: str) -> Any:
    """Return a block's projection if it is one matrix, else None."""
    named = blocks_of(tiny.hf)[layer].named_modules()
    ends = [module for path, module in named if path.rpartition(".")[2] in PROJECTIONS[name]]
    return ends[0] if len(ends) == 1 and isinstance(ends[0], nn.Linear) else None


@contextmanager
def zero_mlps(tiny: Tiny) -> Iterator[None]:
    """Let every MLP return 0."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for mlp in _mlps(tiny):
            monkeypatch.setattr(mlp, "forward", _zeros(mlp.forward))
        yield


def _mlps(tiny: Tiny) -> list[nn.Module]:
    names = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "ffn")
    blocks = [dict(block.named_children()) for block in blocks_of(tiny.hf)]
    return [block[name] for block in blocks for name in names if name in block]


def _zeros(forward: Callable[..., Any]) -> Callable[..., Any]:
    def zeros(*values: Any, **options: Any) -> Any:
        if len(values) == 2:  # BLOOM's and MPT's add the residual stream themselves
            return values[1]
        returned = forward(*values, **options)
        if isinstance(returned, tuple):  # with the router's logits
            return (torch.zeros_like(returned[0]), *returned[1:])
        return torch.zeros_like(returned)

    return zeros
