"""Without ALiBi a model equals one edited by hand."""

from collections.abc import Iterable
from copy import copy, deepcopy
from itertools import combinations
from typing import Any

import pytest
import torch
from support.tiny_models import distance, tokens

from nope_probe.components import Ablation
from nope_probe.experiments.ablation.study import run_ablations
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.removing.targets import components

pytestmark = pytest.mark.hooked_transformer

PLAYERS = ("mask", "alibi", "w_q", "w_k", "w_v")


@pytest.fixture(scope="module")
def model() -> Any:
    return make("alibi")


def make(position: str) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=12,
        d_head=3,
        n_heads=4,
        n_ctx=64,
        d_vocab=263,
        attn_only=True,
        normalization_type="RMS",
        positional_embedding_type=position,
        device="cpu",
        seed=3,
    )
    return HookedTransformer(config).requires_grad_(False)


def edited(model: Any, remove: Iterable[str]) -> Any:
    """Set weights, biases, ALiBi and configuration of a copy by hand; c = 1, P is I."""
    copied = deepcopy(model)
    for block in copied.blocks:
        attn = block.attn
        for name in {"w_q", "w_k", "w_v"} & set(remove):
            getattr(attn, name.upper()).copy_(torch.eye(12).view(12, 4, 3).transpose(0, 1))
            getattr(attn, f"b_{name[-1].upper()}").zero_()
        attn.cfg = copy(attn.cfg)
        attn.cfg.attention_dir = "bidirectional" if "mask" in remove else "causal"
        if "alibi" in remove:
            attn.alibi = torch.zeros(4, 64, 64)
    return copied


def test_removals_equal_a_copy_edited_by_hand(model: Any) -> None:
    inputs, errors = tokens(3), {}
    assert components(model) == ("mask", "w_q", "w_k", "w_o", "w_v", "alibi")
    for size in range(len(PLAYERS) + 1):
        for remove in combinations(PLAYERS, size):
            expected = edited(model, remove)(inputs)
            with ablated(model, Ablation(remove=remove, gain="identity")):
                errors[remove] = distance(model(inputs), expected)
    assert not {remove: error for remove, error in errors.items() if not error <= 1e-5}


def test_alibi_in_named_heads_equals_a_copy_without_their_slopes(model: Any) -> None:
    inputs = tokens(3)
    model(inputs)  # makes the bias
    copied = deepcopy(model)
    copied.blocks[1].attn.alibi[[0, 2]] = 0
    with ablated(model, Ablation(remove=["alibi"], heads={1: [0, 2]})):
        assert distance(model(inputs), copied(inputs)) <= 1e-5


def test_alibi_is_the_source_of_the_first_layers_pattern_and_the_mask_is_not(model: Any) -> None:
    sources = run_ablations(model, tokens(32, 17), players=["sources"]).sources
    first = sources[sources["layer"] == 0].set_index("term")
    assert list(first.index) == ["content", "mask", "alibi", "mask_x_alibi", "position"]
    assert abs(first.loc["mask", "rms"]) < 1e-5
    assert first.loc["alibi", "share"] > 0.9
