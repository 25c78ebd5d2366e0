"""A model with plain norms equals the model whose norm weights are edited to 1."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from support.tiny_models import ByName, ModelOf, distance, tokens

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.model import run_blocks
from nope_probe.hooks.reading.capture import capture_stages
from nope_probe.hooks.removing.edited_weights import plain_norms
from nope_probe.models.load import to_hooked
from nope_probe.models.parameter_free import build, parameter_free

NORMS = ("input_layernorm", "post_attention_layernorm")


def edited(hf: Any) -> Any:
    """Set the weights of the blocks' norms to 1 by hand, in a copy."""
    copied = deepcopy(hf)
    for block in copied.model.layers:
        for name in NORMS:
            getattr(block, name).weight.data.fill_(1.0)
    return copied


@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3", "hooked:smollm3-rope"]
)
def test_a_model_with_plain_norms_equals_an_edited_model(
    spec: str, tiny: ByName, model_of: ModelOf
):
    model, name = model_of(spec)
    with torch.no_grad():
        before, plain = model(tokens()), edited(tiny(name).hf)(tokens()).logits
        with plain_norms(model):
            assert distance(model(tokens()), plain) < 1e-5
        assert distance(before, plain) > 1e-3
        assert model(tokens()).equal(before)


@pytest.mark.parametrize("letter", ["a", "f", "h"])
def test_stages_after_a_plain_norm_have_mean_square_1(hooked: ByName, bridge: ByName, letter: Any):
    for model in (hooked("smollm3-nope"), bridge("llama")):
        with plain_norms(model):
            gram = capture_stages(model, tokens(), stages=[letter], n_folds=1).mean(letter)
        size = model.cfg.d_model
        assert gram.diagonal().tolist() == pytest.approx([size] * len(gram), rel=1e-3)


def test_an_ablation_inside_plain_norms_equals_an_ablation_of_an_edited_model(
    tiny: ByName, hooked: ByName
):
    spec = Ablation(remove=["mask", "w_q", "w_k"], gain="norm")
    model, expected = hooked("smollm3-rope"), to_hooked(edited(tiny("smollm3-rope").hf))
    with torch.no_grad():
        with plain_norms(model), ablated(model, spec):
            ours = model(tokens())
        with ablated(expected, spec):
            assert distance(ours, expected(tokens())) < 1e-5


def test_plain_norms_change_nothing_where_norms_have_no_weights():
    model = build(parameter_free(n_layers=2, d_model=10))
    x = torch.randn(3, 7, 10)
    before = run_blocks(model, x)
    with plain_norms(model):
        assert run_blocks(model, x).equal(before)


@pytest.mark.hooked_transformer
def test_a_norm_weight_of_0_is_an_error(tiny: ByName):
    model = to_hooked(tiny("smollm3-rope").hf)
    model.blocks[0].ln2.w.data[3] = 0.0
    with (
        pytest.raises(ValueError, match="L0 ln2 has a weight of 0, which cannot be divided out"),
        plain_norms(model),
    ):
        pass
