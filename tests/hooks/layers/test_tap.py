"""The tap of every scheme of attention: what it finds, what can be removed, and what is refused."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.tiny_models import Tiny, distance

from nope_probe import load
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of, run_blocks, traits_of
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.targets import components

Decoder = Callable[[str], tuple[Any, Tiny]]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Return a loaded tiny decoder and its plain model, by transformers' name of its type."""
    root: Path = tmp_path_factory.mktemp("decoders")

    def make(model_type: str) -> tuple[Any, Tiny]:
        tiny = write_decoder(model_type, root)
        return load(str(tiny.folder)).model, tiny

    return cache(make)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {"rope"}),
        ("gpt_oss", {"rope", "window", "sink"}),
        ("mistral", {"rope", "window"}),
        ("llama4_text", {"rope", "window"}),
        ("gpt_neo", {"pos_embed", "window"}),
        ("bloom", {"alibi"}),
    ],
)
def test_sources_and_sinks_are_found_by_one_short_pass(
    model_type: str, more: set[str], decoder: Decoder
) -> None:
    model, _ = decoder(model_type)
    weights = {"mask", "w_q", "w_k", "w_o", "w_v", "mlp"}
    assert set(components(model)) == weights | more


def test_without_sinks_each_row_of_attention_adds_up_to_one(decoder: Decoder) -> None:
    model, tiny = decoder("gpt_oss")
    rows: list[torch.Tensor] = []

    def keep(pattern: torch.Tensor, hook: object) -> None:
        rows.append(pattern.sum(-1))

    points = [(layer.point("attn.hook_pattern"), keep) for layer in layers_of(model)]
    with torch.inference_mode(), hooks_attached(points):
        model(tiny.tokens)
        with ablated(model, Ablation(remove=["sink"], heads={0: [1]})):
            model(tiny.tokens)
    intact, without = rows[0], rows[len(points)]
    assert float(intact.min()) < 0.9
    assert torch.allclose(without[:, 1], torch.ones_like(without[:, 1]))
    assert torch.equal(without[:, 0], intact[:, 0])


@pytest.mark.parametrize("model_type", ["gpt_oss", "gptj", "bloom", "deepseek_v3", "gemma2"])
def test_hooked_scores_are_those_of_fused_attention(model_type: str, decoder: Decoder) -> None:
    model, tiny = decoder(model_type)
    fused = capture_scores(model, tiny.tokens).mean
    points = [(layer.point("attn.hook_attn_scores"), _leave) for layer in layers_of(model)]
    with hooks_attached(points):
        hooked = capture_scores(model, tiny.tokens).mean
    assert torch.equal(fused.isnan(), hooked.isnan())
    assert distance(fused.nan_to_num(), hooked.nan_to_num()) <= 1e-5


def _leave(tensor: torch.Tensor, hook: object) -> None:
    """Read a tensor and leave it."""


def test_layers_of_a_hybrid_keep_their_numbers(decoder: Decoder) -> None:
    model, tiny = decoder("qwen3_next")
    attending = [layer.index for layer in layers_of(model)]
    assert attending == [1, 3]
    assert list(traits_of(model)) == attending
    assert len(capture_scores(model, tiny.tokens, layers=[3]).mean) == 1
    with pytest.raises(IndexError, match=r"L2 does not attend; the layers that do are \[1, 3\]"):
        capture_scores(model, tiny.tokens, layers=[2])
    refused = pytest.raises(ValueError, match="L0 does not attend")
    with refused, ablated(model, Ablation(remove=["mask"], layers=[0])):
        pass


@pytest.mark.parametrize(
    ("model_type", "removal", "message"),
    [
        ("deepseek_v3", {"remove": ["w_k"]}, "w_k of L0 cannot be removed: it is no matrix of its"),
        ("olmo2", {"remove": ["w_k"]}, "w_k of L0 cannot be removed: a norm is over all key heads"),
        ("gptj", {"remove": ["rope"], "heads": {0: [1]}}, "RoPE of L0 cannot be removed in some"),
        ("gptj", {"remove": ["rope_high"]}, "no band rope_high: the model rotates 0 pairs"),
        ("opt", {"remove": ["window"]}, "the model has no window to remove"),
    ],
)
def test_what_cannot_be_removed_is_refused_before_a_pass(
    model_type: str, removal: dict[str, Any], message: str, decoder: Decoder
) -> None:
    model, _ = decoder(model_type)
    refused = pytest.raises(ValueError, match=message)
    with refused, ablated(model, Ablation(gain="identity", **removal)):
        pass


def test_a_copy_of_a_model_has_taps_of_its_own(decoder: Decoder) -> None:
    model, tiny = decoder("llama")
    copied, before = deepcopy(model), run_blocks(model, tiny.tokens)
    with ablated(copied, Ablation(remove=["mask", "rope"])):
        assert torch.equal(run_blocks(model, tiny.tokens), before)
        assert distance(run_blocks(copied, tiny.tokens), before) > 1e-3
    assert torch.equal(run_blocks(copied, tiny.tokens), before)
