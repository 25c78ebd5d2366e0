"""Attention against plain transformers: weights, scores, information, and chosen keys of heads."""

from typing import Any
from weakref import ref

import pandas as pd
import pytest
import torch
from support.plain_attention import assert_attention, plain_attention, plain_scores
from support.rounding import NETWORK, assert_same
from support.tiny_models import ByName, ModelOf, tokens

from nope_probe import ablated, capture_attention, head_scores, load
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import read_attention
from nope_probe.hooks.reading.attention import weights_on
from nope_probe.maps.folds import pooled

N_SEQS, N_FOLDS = 7, 3


# ALiBi; sinks outside the scores; windows that hide first keys.
@pytest.mark.parametrize("spec", ["decoder:bloom", "decoder:gpt_oss", "bridge:gemma2"])
@pytest.mark.parametrize(("n_pos", "query_rows"), [(19, None), (67, None), (67, 23)])
def test_weights_and_information_are_plain_transformers_own(
    spec: str, n_pos: int, query_rows: int | None, model_of: ModelOf
) -> None:
    """67 positions are two groups of rows."""
    (model, tiny), inputs = model_of(spec), tokens(N_SEQS, n_pos)
    options = {"n_folds": N_FOLDS, "batch_size": 5, "query_rows": query_rows}
    maps = capture_attention(model, inputs, **options)
    plain = plain_attention(tiny.hf, inputs)
    of_layers = [plain[layer] for layer in maps.layers]
    assert_attention(maps, of_layers, N_FOLDS, maps.query_positions)
    alone = capture_attention(model, inputs, **options, keeps_scores=False)
    assert alone.scores is None
    assert alone.weights.equal(maps.weights)


@pytest.mark.parametrize("spec", ["hooked:smollm3-rope", "bridge:llama"])
def test_weights_and_their_information_are_those_that_hooks_on_the_pattern_left(
    model_of: ModelOf, spec: str
) -> None:
    model, _ = model_of(spec)
    inputs = tokens(N_SEQS, 13)
    intact = capture_attention(model, inputs)

    def write(pattern: torch.Tensor, hook: object) -> torch.Tensor:
        written = pattern.clone()
        written[:, 1] = torch.eye(13)
        written[:, 2] = torch.ones(13, 13).tril() / torch.arange(1, 14)[:, None]
        written[:, 3] = 0
        return written

    with hooks_attached([(layers_of(model)[1].point("attn.hook_pattern"), write)]):
        maps = capture_attention(model, inputs, n_folds=N_FOLDS, query_rows=11)
        used = model.run_with_cache(inputs)[1]["blocks.1.attn.hook_pattern"]
    rows, mean = maps.query_positions, pooled(maps.weights, maps.counts).double()
    assert_same(mean[1], used.double().mean(0)[:, rows], NETWORK)
    assert_same(mean[0], intact.mean[0][:, rows], NETWORK)
    information, others = (pooled(x, maps.counts)[1] for x in (maps.information, maps.others))
    n_keys = (rows + 1.0).double()
    assert_same(information[1], n_keys.log(), NETWORK)  # the query's own key alone
    others_of_1 = torch.where(rows > 0, (n_keys - 1).clamp_min(1).log(), 0)
    assert_same(others[1], others_of_1, NETWORK)
    for head in (2, 3):  # equal weights, and none
        assert information[head].abs().max() < 1e-6
        assert others[head].abs().max() < 1e-6
    assert_same(information[0], pooled(intact.information, intact.counts)[1, 0, rows], NETWORK)


def test_a_hook_that_changes_no_pattern_changes_no_weight_beside_a_sink(decoder: ModelOf) -> None:
    (model, _), inputs = decoder("gpt_oss"), tokens(N_SEQS, 19)
    intact, heads = capture_attention(model, inputs), head_scores(model, inputs)
    points = [layer.point("attn.hook_pattern") for layer in layers_of(model)]
    with hooks_attached([(point, lambda pattern, hook: pattern.clone()) for point in points]):
        hooked, hooked_heads = capture_attention(model, inputs), head_scores(model, inputs)
    for name in ("weights", "information", "others", "scores"):
        assert_same(getattr(hooked, name), getattr(intact, name), NETWORK)
    pd.testing.assert_frame_equal(hooked_heads, heads, rtol=NETWORK)


def test_vectors_have_no_first_key_apart() -> None:
    maps = capture_attention(load("parameter-free").model, torch.randn(8, 11, 64))
    assert maps.skip_keys == 0
    assert torch.allclose(maps.information, maps.others, atol=1e-6)


def test_what_sinks_take_is_what_plain_transformers_keys_do_not_get(decoder: ModelOf) -> None:
    model, tiny = decoder("gpt_oss")
    of_keys = tiny.hf(tiny.tokens, output_attentions=True).attentions
    expected = torch.stack([1 - weights.sum(-1).mean((0, 2)) for weights in of_keys])
    maps = capture_attention(model, tiny.tokens, n_folds=1)
    assert_same(maps.sinks[0], expected.double(), NETWORK)
    assert expected.min() > 0.01
    assert_same(maps.weights.sum(-1), torch.ones(maps.weights.shape[:-1]), NETWORK)
    with ablated(model, "sink"):
        assert float(capture_attention(model, tiny.tokens, n_folds=1).sinks.abs().max()) == 0.0


INPUTS, ROWS = tokens(n_seqs=3, n_pos=13), torch.arange(13)
KEYS = torch.stack((torch.zeros_like(ROWS), (ROWS - 1).clamp_min(0), ROWS // 2))


def leave(tensor: torch.Tensor, hook: Any) -> None:
    """Read scores and leave them: enough to need the hooked path."""


@pytest.mark.parametrize("rows", [5, 128])
@pytest.mark.parametrize("way", ["fused", "hooked"])
@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:phi3", "bridge:qwen3", "hooked:smollm3-rope"]
)
def test_weights_are_those_of_plain_transformers(
    spec: str, way: str, rows: int, model_of: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nope_probe.hooks.reading.attention.ROWS", rows)
    model, tiny = model_of(spec)
    true = plain_scores(tiny.hf, INPUTS).nan_to_num(nan=-torch.inf).softmax(-1)
    users = [(layers_of(model)[0].point("attn.hook_attn_scores"), leave)] * (way == "hooked")
    with hooks_attached(users):
        weights = read_attention(model, INPUTS, lambda _, attention: weights_on(attention, KEYS))
    for layer, actual in enumerate(weights):
        expected = torch.stack([true[layer][..., ROWS, keys] for keys in KEYS], -1).float()
        assert_same(actual, expected)


def test_no_scores_are_kept_when_the_next_block_runs(bridge: ByName) -> None:
    model, before, alive = bridge("llama"), [], []

    def watch(scores: torch.Tensor, hook: object) -> None:
        alive.append(sum(reference() is not None for reference in before))
        before.append(ref(scores))

    points = [layer.point("attn.hook_attn_scores") for layer in layers_of(model)]
    with hooks_attached([(point, watch) for point in points]):
        read_attention(model, INPUTS, lambda _, attention: weights_on(attention, KEYS))
    assert alive == [0, 0]
