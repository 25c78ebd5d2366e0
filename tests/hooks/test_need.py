"""Need against two rows of plain transformers' softmax, and against a head edited by hand."""

from typing import Any

import pytest
import torch
from support.edited_model import constants, edited
from support.plain_attention import plain_attention
from support.rounding import assert_same
from support.tiny_models import ByName, ModelOf, tokens
from torch import Tensor

from nope_probe import Ablation, UserError, ablated, capture_need
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of

N_SEQS, N_POS, N_FOLDS = 7, 19, 3
BOUND = 1e-5  # nats
INPUTS = tokens(N_SEQS, N_POS)


def changed(hf: Any, number: int, removed: str) -> Tensor:
    """Return a layer's scores on the inputs that it has, without a component in it alone."""
    name, _, band = removed.partition("[")
    means = constants(hf, INPUTS)
    pairs = [0, 1] if band else None
    plain = edited(hf, [name], where={number: None}, replaced=means, pairs=pairs)
    return plain_attention(plain, INPUTS)[number].scores


def kl(scores: Tensor, other: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the mean over queries of KL of two rows of softmax [seq, head], sinks included."""
    rows = []
    for of in (scores.double(), other.double()):
        if sinks is not None:
            of = torch.cat((of, sinks.double()[:, None, None].expand(*of.shape[:3], 1)), -1)
        rows.append(of.masked_fill(of.isnan(), -torch.inf).softmax(-1))
    first, second = rows
    return torch.where(first > 0, first * (first / second).log(), 0).sum(-1).mean(-1)


# Grouped heads; a band; a soft cap and a window; layers without RoPE; no RoPE; sinks.
CASES = [
    *[("bridge:llama", removed) for removed in ("rope", "rope[0:2]", "mask", "w_q", "w_k")],
    *[("bridge:gemma2", removed) for removed in ("rope", "mask", "window")],
    *[("bridge:smollm3", "rope"), ("hooked:smollm3-rope", "rope"), ("bridge:gpt2", "mask")],
    *[("decoder:gpt_oss", "rope"), ("decoder:gpt_oss", "mask")],
]


@pytest.mark.parametrize(("spec", "removed"), CASES)
def test_need_is_the_divergence_of_plain_transformers_two_rows(
    spec: str, removed: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    hf = tiny.hf
    options = {"n_folds": N_FOLDS, "batch_size": 5}
    need = capture_need(model, INPUTS, removed, **options)
    intact = plain_attention(hf, INPUTS)
    fold_of = torch.arange(N_SEQS) % N_FOLDS
    assert need.layers == (*intact,)
    for place, (number, of_layer) in enumerate(intact.items()):
        expected = kl(of_layer.scores, changed(hf, number, removed), of_layer.sinks)
        means = torch.stack([expected[fold_of == fold].mean(0) for fold in range(N_FOLDS)])
        assert (need.folds[:, place] - means).abs().max() < BOUND
    assert need.mean.max() > 1e-2  # and it is no zero
    last = capture_need(
        model, INPUTS, Ablation(remove=removed, layers=[need.layers[-1]]), **options
    )
    assert_same(last.folds, need.folds[:, -1:])


def test_what_no_head_can_lose_alone_is_refused_with_what_it_can(bridge: ByName) -> None:
    model = bridge("llama")
    for removed, message in (
        ("mlp", "mask, window, rope"),
        ([], "not nothing"),
        (Ablation(remove="w_q", replacement="identity"), "replacement='mean'"),
        (Ablation(remove="rope", heads={0: [1]}), "name layers"),
        ("alibi", "the model has no alibi"),
    ):
        with pytest.raises(UserError, match=message):
            capture_need(model, INPUTS, removed)
    with ablated(model, "mask"), pytest.raises(UserError, match="before `ablated`"):
        capture_need(model, INPUTS, "rope")
    point = layers_of(model)[0].point("attn.hook_attn_scores")
    refused = pytest.raises(NotImplementedError, match="hooks change the attention of L0")
    with hooks_attached([(point, lambda scores, hook: scores / 2)]), refused:
        capture_need(model, INPUTS, "rope")
