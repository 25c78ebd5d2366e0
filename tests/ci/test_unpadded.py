"""Whole sequences have the causal mask, however the tokenizer of a HookedTransformer pads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plain_attention import plain_maps
from support.plain_states import plain_losses
from support.rounding import NETWORK, assert_same
from transformers import AutoModelForCausalLM, PreTrainedModel

from nope_probe import Ablation, ablated, capture_losses, capture_scores, load
from nope_probe.hooks.layers.passes import evaluated, run_blocks
from nope_probe.models.names import CHECKPOINTS

Change = Callable[[Any], None]


def pad_with_bos(model: Any) -> None:
    model.tokenizer.pad_token = model.tokenizer.bos_token


def pad_with_a_token_of_the_text(model: Any) -> None:
    model.tokenizer.pad_token_id = 7


def prepend_nothing(model: Any) -> None:
    pad_with_bos(model)
    model.cfg.default_prepend_bos = False


@pytest.fixture
def hf() -> PreTrainedModel:
    folder = CHECKPOINTS["rope-tiny"]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens(n_bos: int) -> torch.Tensor:
    drawn = torch.randint(1, 19, (7, 13), generator=torch.Generator().manual_seed(0))
    drawn[:, :n_bos] = 0
    drawn[0, n_bos : n_bos + 3] = 7
    return drawn


@pytest.mark.hooked_transformer
@pytest.mark.parametrize("n_bos", [0, 1, 2])
@pytest.mark.parametrize("change", [pad_with_bos, pad_with_a_token_of_the_text, prepend_nothing])
def test_scores_and_losses_are_plain_transformers_whatever_the_tokenizer_pads(
    hf: PreTrainedModel, change: Change, n_bos: int
) -> None:
    model: Any = load("rope-tiny").model
    change(model)
    model.tokenizer.padding_side = "left"
    given = tokens(n_bos)
    assert_same(capture_scores(model, given).mean, plain_maps(hf, given), NETWORK)
    assert_same(capture_losses(model, given), plain_losses(hf, given), NETWORK)
    with ablated(model, Ablation(remove="mask")):
        maps = capture_scores(model, given).mean
    assert_same(maps, plain_maps(hf, given, without="mask"), NETWORK)
    assert model.tokenizer.padding_side == "left"


@pytest.mark.hooked_transformer
def test_learned_positions_count_from_the_first_token() -> None:
    model: Any = load("nope-tiny").model
    model.pos_embed.W_pos.data.normal_(generator=torch.Generator().manual_seed(0))
    given = tokens(n_bos=2)
    with torch.inference_mode():
        expected = run_blocks(model, given)
        pad_with_bos(model)
        model.tokenizer.padding_side = "left"
        assert run_blocks(model, given).equal(expected)


@pytest.mark.hooked_transformer
def test_an_attention_mask_of_the_callers_hides_what_it_says() -> None:
    model: Any = load("rope-tiny").model
    given, mask = tokens(n_bos=1), torch.ones(7, 13, dtype=torch.long)
    mask[:, :5] = 0
    shorter = model(given[:, 5:])
    pad_with_bos(model)
    model.tokenizer.padding_side = "left"
    with evaluated(model):
        assert_same(model(given, attention_mask=mask)[:, 5:], shorter, NETWORK)
