"""A hooked model that computes something else fails parity; maps are the same on both versions."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from support.decoders import write_decoder
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf

from nope_probe import UserError, build, load, parameter_free
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import TRAITS, traits_of
from nope_probe.hooks.layers.reference import errors_of, probe_tokens, probed
from nope_probe.hooks.layers.tap import Edits, edited
from nope_probe.models.info import ModelInfo
from nope_probe.models.load import describe, error_of_tap, position_dependence

BRIDGES = ("llama", "phi3", "qwen3", "smollm3", "gemma2", "mistral", "gpt2")
ALL = (*map("bridge:{}".format, BRIDGES), "hooked:smollm3-rope", "hooked:smollm3-nope")


@pytest.mark.parametrize("spec", ALL)
def test_a_faithful_model_passes_with_its_parity_measured(spec: str, model_of: ModelOf) -> None:
    model, tiny = model_of(spec)
    info = describe(model, tiny.name, errors_of(model, probed(tiny.hf, with_patterns=True)))
    assert set(info.parity) == {"logits", "pattern"}
    assert max(info.parity.values()) <= NETWORK


CHANGES = {
    "flip": lambda tensor, hook: tensor.flip(1),
    "stretch": lambda tensor, hook: 1.01 * tensor,
    "spoil": lambda tensor, hook: tensor * torch.nan,
    "spoil one": lambda tensor, hook: tensor.index_fill(0, torch.tensor(0), torch.nan),
}


@pytest.mark.parametrize(
    ("point", "change", "what"),
    [
        *(("attn.hook_attn_scores", change, "logits|pattern") for change in [*CHANGES][1:]),
        ("attn.hook_pattern", "stretch", "logits"),
        ("attn.hook_k", "flip", "logits|pattern"),
        ("hook_resid_post", "flip", "logits"),
        ("hook_mlp_out", "stretch", "logits"),
    ],
)
@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_model_with_a_changed_hook_point_fails_with_the_measured_error(
    spec: str, point: str, change: str, what: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    reference = probed(tiny.hf, with_patterns=True)
    changed = layers_of(model)[1].point(point)
    of_layers = "" if point in ("attn.hook_pattern", "hook_mlp_out", "hook_resid_post") else "L1"
    message = rf"fails parity: ({what}) off by [\d.na].*{of_layers}"
    with hooks_attached([(changed, CHANGES[change])]), pytest.raises(UserError, match=message):
        errors_of(model, reference)


def test_position_ids_change_the_scores_of_a_bridge_only_with_rope(
    bridge: ByName,
) -> None:
    model = bridge("smollm3-nope")
    assert describe(model, "nope", error_of_tap(model)).parity["positions"] <= NETWORK
    assert position_dependence(bridge("llama")) > 0.1


def test_a_bridge_fails_if_its_rope_is_overlooked(
    bridge: ByName, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bridge("llama")
    overlooked = {layer: replace(of, rotary=None) for layer, of in traits_of(model).items()}
    monkeypatch.setitem(TRAITS, model, overlooked)
    with pytest.raises(UserError, match="rotated fails parity: positions off by"):
        describe(model, "rotated", error_of_tap(model))


def test_the_probe_stays_within_the_vocabulary_and_is_always_the_same() -> None:
    assert probe_tokens(11).max() < 11
    assert torch.equal(probe_tokens(263), probe_tokens(263))


def test_an_info_has_the_sizes_of_the_model_and_is_json(bridge: ByName) -> None:
    info = describe(bridge("smollm3"), "mine")
    sizes = {"n_layers": 3, "depth": 3, "n_heads": 6, "n_kv_heads": 2, "d_head": 10, "d_model": 34}
    assert info == ModelInfo(
        **{"name": "mine", "source": "configuration", "architecture": "SmolLM3ForCausalLM"},
        **{"kind": "TransformerBridge", "n_ctx": 64, "d_vocab": 263} | sizes,
        rope_layers=(True, False, True),
    )
    assert json.loads(json.dumps(asdict(info)))["rope_layers"] == [True, False, True]


def test_the_blocks_of_a_hybrid_that_do_not_attend_are_named(tmp_path: Path) -> None:
    tiny = write_decoder("qwen3_next", tmp_path)
    info = load(str(tiny.folder)).info
    assert (info.n_layers, info.not_attending, info.attending) == (4, (0, 2), (1, 3))
    assert (info.name, info.source) == (str(tiny.folder), str(tiny.folder))
    assert info.revision is None
    assert {*info.parity} == {"logits", "pattern"}
    assert not info.parameter_free


@pytest.mark.parametrize("name", ["gpt2", "llama", "smollm3-nope"])
def test_without_a_reference_the_tap_is_compared_with_transformer_lens(
    name: str, bridge: ByName
) -> None:
    """Position ids are permuted only where nothing reads positions."""
    model = bridge(name)
    parity = describe(model, name, error_of_tap(model)).parity
    assert {*parity} == {"output", *(["positions"] if name == "smollm3-nope" else [])}
    assert max(parity.values()) <= 1e-5


@pytest.mark.hooked_transformer
def test_a_tap_that_computes_something_else_fails_parity() -> None:
    model = build(parameter_free(2, 6))
    assert {*describe(model, "bare", error_of_tap(model)).parity} == {"output"}
    tap = layers_of(model)[0].tap
    with (
        edited({tap: Edits(change=lambda x: replace(x, scale=1.1 * x.scale))}),
        pytest.raises(UserError, match=r"bare fails parity: output off by .* different outputs"),
    ):
        describe(model, "bare", error_of_tap(model))
