"""Ablations of a HookedTransformer that no Hugging Face model converts into.

LayerNorm with biases, biases in every projection, q/k-norm, a soft cap, adjacent rotary pairs. The
oracle is a copy of the model whose parameters are set by hand; without mask or RoPE, each attention
module gets a configuration of its own.
"""

from collections.abc import Iterable
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from einops import rearrange
from support.edited_model import SEVEN, rectangular_identity, subsets
from support.tiny_models import distance, tokens

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.model import layers_of

pytestmark = pytest.mark.hooked_transformer


@pytest.fixture(scope="module")
def model() -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=23,
        d_head=10,
        n_heads=3,
        d_mlp=37,
        n_ctx=64,
        d_vocab=263,
        act_fn="gelu",
        normalization_type="LN",
        positional_embedding_type="rotary",
        rotary_dim=6,
        rotary_adjacent_pairs=True,
        use_qk_norm=True,
        attn_scores_soft_cap=5.0,
        device="cpu",
    )
    model, generator = HookedTransformer(config), torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = name.endswith((".w", "norm.weight"))
        size = 1.0 if "embed.W" in name else 0.25
        parameter.requires_grad_(False).copy_(is_norm + size * noise)
    return model


@pytest.fixture(scope="module")
def copied(model: Any) -> Any:
    return deepcopy(model)


def edited(copied: Any, model: Any, remove: Iterable[str]) -> Any:
    """Set weights, biases and configuration of a copy by hand; c = 1."""
    copied.load_state_dict(model.state_dict())
    remove = set(remove)
    for block in copied.blocks:
        attn = block.attn
        for name in ("w_q", "w_k", "w_v"):
            if name in remove:
                p = rectangular_identity(name, (30, 23))
                per_head = rearrange(p, "(head h) m -> head m h", head=3)
                getattr(attn, name.upper()).copy_(per_head)
                getattr(attn, f"b_{name[-1].upper()}").zero_()
        if "w_o" in remove:
            p = rectangular_identity("w_o", (23, 30))
            attn.W_O.copy_(rearrange(p, "m (head h) -> head h m", head=3))
            attn.b_O.zero_()
        if "mlp" in remove:
            block.mlp.W_out.zero_()
            block.mlp.b_out.zero_()
        attn.cfg = copy(attn.cfg)
        attn.cfg.attention_dir = "bidirectional" if "mask" in remove else "causal"
        attn.cfg.positional_embedding_type = "standard" if "rope" in remove else "rotary"
    return copied


def test_all_128_combinations_equal_a_copy_edited_by_hand(model: Any, copied: Any) -> None:
    inputs, errors = tokens(3), {}
    for remove in subsets(SEVEN):
        expected = edited(copied, model, remove)(inputs)
        with ablated(model, Ablation(remove=remove, gain="identity")):
            errors[remove] = distance(model(inputs), expected)
    assert not {remove: error for remove, error in errors.items() if not error <= 1e-5}


def test_each_removal_changes_the_model(model: Any, copied: Any) -> None:
    inputs = tokens(3)
    intact = model(inputs)
    for component in SEVEN:
        assert distance(edited(copied, model, [component])(inputs), intact) > 1e-2, component


@pytest.mark.parametrize(
    "settings", [{"parallel_attn_mlp": True}, {"use_normalization_before_and_after": True}]
)
def test_parallel_and_post_norm_blocks_of_a_hooked_transformer_are_an_error(
    settings: dict[str, bool],
) -> None:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=1,
        d_model=6,
        d_head=3,
        n_ctx=5,
        d_vocab=7,
        act_fn="relu",
        normalization_type="RMS",
        device="cpu",
        **settings,
    )
    with pytest.raises(NotImplementedError, match="read through TransformerBridge"):
        layers_of(HookedTransformer(config))
