"""Removing the mask in a prefix equals a model with an edited 4-D mask."""

from typing import Any

import pytest
import torch
from support.edited_model import SEVEN, edited, norm_sizes, plain_run
from support.hooked_runs import hooked_run, hooks_left, largest_error
from support.tiny_models import ByName, ModelOf

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.attention import Mask


@pytest.mark.parametrize("remove", [("mask",), ("mask", "rope", "w_k"), SEVEN], ids="+".join)
@pytest.mark.parametrize("prefix", [1, 7, 11])
@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:mistral", "bridge:gemma2", "hooked:smollm3-rope"]
)
def test_a_bidirectional_prefix_equals_an_additive_mask_that_is_zero_in_the_prefix(
    spec: str, prefix: int, remove: tuple[Any, ...], model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    hf, tokens = tiny(name).hf, tiny(name).tokens
    expected = plain_run(edited(hf, remove, norm_sizes(hf), prefix=prefix), tokens)
    with ablated(model, Ablation(remove=remove, prefix=prefix, gain="norm")):
        assert largest_error(hooked_run(model, tokens), expected) <= 1e-5


def test_later_queries_do_not_see_what_follows_them(bridge: ByName, tiny: ByName) -> None:
    model, tokens = bridge("llama"), tiny("llama").tokens
    other = tokens.clone()
    other[:, 8] += 1
    with torch.inference_mode(), ablated(model, Ablation(remove=["mask"], prefix=5)):
        before, after = model(tokens), model(other)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_a_sliding_window_stays_one_for_later_queries() -> None:
    causal, position = torch.ones(5, 5, dtype=torch.bool).tril(), torch.arange(5)
    window = causal & (position[:, None] - position < 2)
    expected = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    found = Mask.of(window[None, None]).without(frozenset({"mask"}), 3)
    assert found.rows()[0, 0].int().tolist() == expected


def test_a_prefix_beyond_the_context_or_the_sequence_is_an_error(
    bridge: ByName, tiny: ByName
) -> None:
    model = bridge("llama")
    context = pytest.raises(ValueError, match=r"prefix of 65 positions, but .* context is 64")
    with context, ablated(model, Ablation(remove=["mask"], prefix=65)):
        pass
    sequence = pytest.raises(ValueError, match="prefix of 12 positions, but the sequences have 11")
    with sequence, ablated(model, Ablation(remove=["mask"], prefix=12)):
        model(tiny("llama").tokens)
    assert not hooks_left(model)
