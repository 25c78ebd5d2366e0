"""Need against two rows of plain transformers' softmax, and against a head edited by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.edited_model import constants, edited
from support.plain_attention import plain_attention
from support.tiny_models import ByName, ModelOf, Tiny
from torch import Tensor

from nope_probe import Ablation, UserError, ablated, capture_need, load
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import read_attention

N_SEQS, N_POS, N_FOLDS = 7, 19, 3
BOUND = 1e-5  # nats


def inputs() -> Tensor:
    return torch.randint(3, 60, (N_SEQS, N_POS), generator=torch.Generator().manual_seed(0))


def changed(hf: Any, number: int, removed: str) -> Tensor:
    """Return a layer's scores on the inputs that it has, without a component in it alone."""
    name, _, band = removed.partition("[")
    means = constants(hf, inputs())
    pairs = [0, 1] if band else None
    plain = edited(hf, [name], where={number: None}, replaced=means, pairs=pairs)
    return plain_attention(plain, inputs())[number].scores


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
    *[("llama", removed) for removed in ("rope", "rope[0:2]", "mask", "w_q", "w_k")],
    *[("gemma2", removed) for removed in ("rope", "mask", "window")],
    *[("smollm3", "rope"), ("gpt2", "mask"), ("gpt_oss", "rope"), ("gpt_oss", "mask")],
]


@pytest.mark.parametrize(("name", "removed"), CASES)
def test_need_is_the_divergence_of_plain_transformers_two_rows(
    tiny: ByName, tmp_path: Path, name: str, removed: str
) -> None:
    model: Tiny = write_decoder(name, tmp_path) if name == "gpt_oss" else tiny(name)
    need = capture_need(
        load(str(model.folder)).model, inputs(), removed, n_folds=N_FOLDS, batch_size=5
    )
    intact = plain_attention(model.hf, inputs())
    fold_of = torch.arange(N_SEQS) % N_FOLDS
    assert need.layers == (*intact,)
    for place, (number, of_layer) in enumerate(intact.items()):
        expected = kl(of_layer.scores, changed(model.hf, number, removed), of_layer.sinks)
        means = torch.stack([expected[fold_of == fold].mean(0) for fold in range(N_FOLDS)])
        assert (need.folds[:, place] - means).abs().max() < BOUND
    assert need.mean.max() > 1e-2  # and it is no zero


@pytest.mark.parametrize("spec", ["hooked:smollm3-rope", "bridge:llama"])
def test_need_of_a_head_is_that_of_its_rotation_alone(spec: str, model_of: ModelOf) -> None:
    model, _ = model_of(spec)
    need = capture_need(model, inputs(), Ablation(remove="rope", layers=[1]), batch_size=4)

    def rows() -> Tensor:
        patterns = read_attention(model, inputs(), lambda _, attention: attention.pattern())
        return patterns[1].double()[:, 3]

    before = rows()
    with ablated(model, Ablation(remove="rope", heads={1: [3]})):
        after = rows()
    expected = torch.where(before > 0, before * (before / after).log(), 0).sum(-1).mean()
    assert need.mean.shape == (1, layers_of(model)[1].n_heads)
    assert abs(need.mean[0, 3] - expected) < BOUND


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
            capture_need(model, inputs(), removed)
    with ablated(model, "mask"), pytest.raises(UserError, match="before `ablated`"):
        capture_need(model, inputs(), "rope")
    point = layers_of(model)[0].point("attn.hook_attn_scores")
    refused = pytest.raises(NotImplementedError, match="hooks change the attention of L0")
    with hooks_attached([(point, lambda scores, hook: scores / 2)]), refused:
        capture_need(model, inputs(), "rope")
