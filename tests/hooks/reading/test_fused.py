"""Fused attention gives the maps that hooked scores give, and gives way to hooks on scores."""

import math
from typing import Any

import pytest
import torch
from support.rounding import NETWORK
from support.tiny_models import tokens

from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.model import layers_of, tapped

TOKENS = tokens(n_seqs=7, n_pos=13)


@pytest.mark.hooked_transformer
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("positional_embedding_type", "alibi"),
        ("use_attention_sinks", True),
        ("use_attn_result", True),
        ("attn_scores_soft_cap", 0.5),
    ],
)
def test_the_tap_of_a_hooked_transformer_computes_what_transformer_lens_does(
    option: str, value: Any
) -> None:
    model = option_model(option, value)
    with torch.inference_mode():
        own = model(TOKENS)
        with tapped(model):
            assert relative_error(model(TOKENS), own) <= NETWORK
    plain = option_model(option, None)
    with torch.inference_mode():
        assert option == "use_attn_result" or relative_error(plain(TOKENS), own) > 1e-3


@pytest.mark.hooked_transformer
def test_what_heads_write_is_shown_where_a_hooked_transformer_keeps_it() -> None:
    model = option_model("use_attn_result", True)
    with torch.inference_mode(), tapped(model):
        _, cache = model.run_with_cache(TOKENS)
        written = cache["blocks.1.attn.hook_result"].sum(2) + model.blocks[1].attn.b_O
    assert relative_error(written, cache["blocks.1.hook_attn_out"]) <= NETWORK


def option_model(option: str, value: Any) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    settings = {
        **{"n_layers": 2, "d_model": 22, "d_head": 11, "n_heads": 2, "n_ctx": 64, "d_vocab": 263},
        **{"act_fn": "silu", "seed": 3, "initializer_range": 0.5},
    }
    if value is not None:
        settings[option] = value
    model = HookedTransformer(HookedTransformerConfig(**settings))
    for block in model.blocks:
        if hasattr(block.attn, "sinks"):
            torch.nn.init.normal_(block.attn.sinks)
    return model


@pytest.mark.hooked_transformer
def test_attention_of_another_formula_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="clipped and log-n attention"):
        layers_of(option_model("clip_qkv", 0.05))


def test_the_error_of_no_values_or_of_nan_is_undefined() -> None:
    nothing = torch.zeros(0)
    assert math.isnan(relative_error(nothing, nothing))
    assert math.isnan(relative_error(torch.tensor([1.0, torch.nan]), torch.ones(2)))
    assert relative_error(torch.tensor([1.0, 5.0]), torch.tensor([2.0, -4.0])) == 9 / 4
