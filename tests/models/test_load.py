"""LoadedModel and converted models equal plain transformers."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from support.edited_model import edited
from support.plain_states import plain_states
from support.tiny_models import CONFIGS, distance, plain, randomised, smollm3_config, tokens

from nope_probe.errors import UserError
from nope_probe.hooks.capture import capture_scores
from nope_probe.hooks.forward import hooks_attached, run_forward
from nope_probe.hooks.layer import layers_of
from nope_probe.models.load import load, to_hooked
from nope_probe.models.names import CHECKPOINTS
from nope_probe.models.presets import hooked_config, nope_llama


@pytest.mark.parametrize("name", ["smollm3-rope", "smollm3-nope"])
def test_a_converted_model_gives_the_logits_of_transformers(
    name: str, tiny: Callable[[str], Any], hooked: Callable[[str], Any]
) -> None:
    windows = tokens(5, 23, seed=3)
    truth = tiny(name).hf(windows).logits
    assert (hooked(name)(windows) - truth).abs().max() <= 1e-4
    assert distance(hooked(name)(windows), truth) <= 1e-5


def test_a_plain_llama_converts_too() -> None:
    config = CONFIGS["llama"]()
    config.attention_bias = config.mlp_bias = False
    hf, windows = randomised(config), tokens(5)
    assert distance(to_hooked(hf)(windows), hf(windows).logits) <= 1e-5


@pytest.mark.parametrize("name", ["smollm3-rope", "smollm3-nope"])
def test_hooked_transformer_and_bridge_of_a_folder_give_the_same_maps(
    name: str, hooked: Callable[[str], Any], bridge: Callable[[str], Any]
) -> None:
    windows = tokens(17, seed=3)
    ours, theirs = (
        capture_scores(model(name), windows, n_folds=2).folds.nan_to_num()
        for model in (hooked, bridge)
    )
    assert distance(ours, theirs) <= 1e-5


def test_a_model_that_is_converted_stays_as_it_is() -> None:
    hf, windows = randomised(smollm3_config([1, 1])).train().requires_grad_(True), tokens(5)
    before = hf(windows).logits
    modules = [type(module) for module in hf.modules()]
    assert distance(to_hooked(hf)(windows), before) <= 1e-5
    assert [type(module) for module in hf.modules()] == modules
    assert hf.training
    assert all(parameter.requires_grad for parameter in hf.parameters())
    assert hf(windows).logits.equal(before)


def test_a_mixed_model_needs_a_bridge() -> None:
    with pytest.raises(ValueError, match="RoPE in all layers or in none; use a bridge"):
        hooked_config(smollm3_config([1, 0]))


@pytest.mark.parametrize("rope", [False, True])
def test_the_trained_llamas_configuration_switches_rope_in_every_layer(rope: bool) -> None:
    config = nope_llama("tiny", rope)
    assert (config.positional_embedding_type == "rotary") is rope
    assert (config.n_layers, config.n_heads, config.n_key_value_heads) == (4, 4, 2)
    assert (config.d_model, config.d_mlp, config.d_vocab) == (128, 384, 2048)


@pytest.mark.usefixtures("unenforced")
def test_a_size_that_does_not_exist_is_an_error() -> None:
    size: Any = "70b"
    with pytest.raises(ValueError, match=r"size tiny or 1.5b, got '70b'"):
        nope_llama(size)


@pytest.mark.parametrize(("name", "rope"), [("nope-tiny", False), ("ROPE-tiny", True)])
def test_shipped_models_load_by_name_in_any_case_and_are_the_ones_on_disk(
    name: str, rope: bool, kind: str
) -> None:
    loaded = load(name)
    assert loaded.info.kind == kind == type(loaded.model).__name__
    assert loaded.info.rope_layers == (rope,) * 4
    assert loaded.tokenizer is not None
    windows = loaded.tokenizer("def f(x):\n    return x", return_tensors="pt")["input_ids"]
    assert windows[0, 0] == loaded.tokenizer.bos_token_id
    truth = plain(CHECKPOINTS[name.lower()])(windows).logits
    assert (loaded.model(windows) - truth).abs().max() <= 1e-4


def test_a_folder_loads_with_its_parity_on_the_card(tiny: Callable[[str], Any]) -> None:
    loaded = load(str(tiny("smollm3").folder))
    info = loaded.info
    assert (info.kind, info.architecture) == ("TransformerBridge", "SmolLM3ForCausalLM")
    assert info.rope_layers == (True, False, True)
    assert set(info.parity) == {"logits", "pattern", "scores", "keys"}
    assert max(info.parity.values()) <= 1e-5
    windows = tiny("smollm3").tokens
    assert distance(loaded.model(windows), tiny("smollm3").hf(windows).logits) <= 1e-5


@pytest.mark.parametrize("name", ["smollm3", "qwen3", "gemma2"])
def test_the_first_layers_of_a_model_are_those_of_the_whole(
    name: str, tiny: Callable[[str], Any], bridge: Callable[[str], Any]
) -> None:
    windows, part = tokens(3), load(str(tiny(name).folder), n_layers=1)
    assert part.info.n_layers == len(layers_of(part.model)) == 1
    whole = capture_scores(bridge(name), windows, layers=[0], n_folds=1).mean
    seen = capture_scores(part.model, windows, n_folds=1).mean
    assert torch.equal(seen.nan_to_num(), whole.nan_to_num())


def test_the_papers_checkpoint_is_a_llama_whose_rope_is_switched_off(
    tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, llama = "starmpcc/NoPE_1.5B_FW_EDU_15T", tiny("llama")
    copytree(llama.folder, tmp_path / name)
    copytree(llama.folder, tmp_path / "with-rope")
    monkeypatch.chdir(tmp_path)
    unrotated = load(name)
    assert unrotated.info.rope_layers == (False, False)
    assert load("./with-rope").info.rope_layers == (True, True)
    truth = edited(llama.hf, ["rope"])(llama.tokens).logits
    assert distance(unrotated.model(llama.tokens), truth) <= 1e-5


def test_a_bridge_takes_vectors_as_input_embeddings(
    bridge: Callable[[str], Any], tiny: Callable[[str], Any]
) -> None:
    hf, windows, seen = tiny("smollm3").hf, tokens(3), []
    point = layers_of(bridge("smollm3"))[2].point("hook_resid_post")
    with torch.inference_mode(), hooks_attached([(point, lambda t, hook: seen.append(t))]):
        run_forward(bridge("smollm3"), hf.model.embed_tokens(windows))
    assert distance(seen[0], plain_states(hf, windows)[2].output) <= 1e-5


@pytest.mark.parametrize("n_layers", [0, -1, 3])
def test_more_layers_than_there_are_or_none_are_an_error(
    n_layers: int, tiny: Callable[[str], Any]
) -> None:
    with pytest.raises(UserError, match="layer"):
        load(str(tiny("llama").folder), n_layers=n_layers)
