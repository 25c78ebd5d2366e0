"""A model whose hooks do not tell the truth is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nope_probe.errors import UserError
from nope_probe.hooks.forward import hooks_attached
from nope_probe.hooks.layer import layers_of
from nope_probe.models.info import ModelInfo, describe
from nope_probe.models.parity import check, position_dependence, probe_tokens, reference_logits

ModelOf = Callable[[str], tuple[Any, str]]
ALL = (
    "bridge:llama",
    "bridge:phi3",
    "bridge:qwen3",
    "bridge:smollm3",
    "bridge:gemma2",
    "bridge:mistral",
    "bridge:gpt2",
    "hooked:smollm3-rope",
    "hooked:smollm3-nope",
)


@pytest.mark.parametrize("spec", ALL)
def test_an_honest_model_passes_with_its_parity_measured(
    spec: str, model_of: ModelOf, tiny: Callable[[str], Any]
) -> None:
    model, name = model_of(spec)
    info = check(model, describe(model, name), reference_logits(tiny(name).hf))
    assert set(info.parity) == {"logits", "pattern", "scores", "keys"}
    assert max(info.parity.values()) <= 1e-5


def flip(tensor: torch.Tensor, hook: object) -> torch.Tensor:
    return tensor.flip(1)


def stretch(tensor: torch.Tensor, hook: object) -> torch.Tensor:
    return 1.01 * tensor


def as_probabilities(tensor: torch.Tensor, hook: object) -> torch.Tensor:
    """What Llama-4 and AFMoE hand out as scores."""
    return tensor.softmax(-1)


def spoil(tensor: torch.Tensor, hook: object) -> torch.Tensor:
    return tensor * torch.nan


def spoil_one(tensor: torch.Tensor, hook: object) -> torch.Tensor:
    spoilt = tensor.clone()
    spoilt[0, 0, 0, 0] = torch.nan
    return spoilt


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("point", "lie", "what"),
    [
        ("attn.hook_attn_scores", stretch, "scores"),
        ("attn.hook_attn_scores", as_probabilities, "scores"),
        ("attn.hook_attn_scores", spoil, "pattern|scores"),
        ("attn.hook_attn_scores", spoil_one, "pattern|scores"),
        ("attn.hook_pattern", stretch, "pattern"),
        ("attn.hook_rot_k", flip, "keys"),
        ("hook_resid_post", flip, "logits"),
        ("hook_mlp_out", stretch, "logits"),
    ],
)
@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_model_that_lies_is_refused_with_the_measured_mismatch(
    spec: str,
    point: str,
    lie: Any,
    what: str,
    layer: int,
    model_of: ModelOf,
    tiny: Callable[[str], Any],
) -> None:
    model, name = model_of(spec)
    reference = reference_logits(tiny(name).hf)
    liar = layers_of(model)[layer].point(point)
    message = rf"{name} breaks the contract of its hooks: ({what}) off by [\d.na]"
    with hooks_attached([(liar, lie)]), pytest.raises(UserError, match=message):
        check(model, describe(model, name), reference)


def test_a_bridge_without_rope_is_shown_not_to_read_position_ids(
    bridge: Callable[[str], Any],
) -> None:
    model = bridge("smollm3-nope")
    assert check(model, describe(model, "nope")).parity["positions"] <= 1e-6
    assert position_dependence(bridge("llama")) > 0.1


def test_a_false_claim_of_no_position_encoding_is_refused(bridge: Callable[[str], Any]) -> None:
    model = bridge("llama")
    claim = replace(describe(model, "liar"), rope_layers=(False, False))
    with pytest.raises(UserError, match="liar breaks the contract of its hooks: positions off by"):
        check(model, claim)


def test_the_probe_stays_within_the_vocabulary_and_is_always_the_same() -> None:
    assert probe_tokens(11).max() < 11
    assert torch.equal(probe_tokens(263), probe_tokens(263))


def test_a_card_is_json_and_says_what_the_model_is(bridge: Callable[[str], Any]) -> None:
    info = describe(bridge("smollm3"), "mine", source="a folder", architecture="SmolLM3ForCausalLM")
    assert info == ModelInfo(
        name="mine",
        source="a folder",
        architecture="SmolLM3ForCausalLM",
        kind="TransformerBridge",
        n_layers=3,
        n_heads=6,
        n_kv_heads=2,
        d_head=10,
        d_model=34,
        n_ctx=64,
        d_vocab=263,
        rope_layers=(True, False, True),
    )
    assert json.loads(json.dumps(info.to_dict()))["rope_layers"] == [True, False, True]
