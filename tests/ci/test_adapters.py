"""Adapters are merged into the weights of their base, or refused in a line that says what to do."""

import json
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import adapted, lora
from support.plain_states import plain_losses
from support.rounding import NETWORK
from support.tiny_models import ByName, distance, plain, tokens, users_bridge
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from nope_probe import Ablation, UserError, ablated, capture_losses, load
from nope_probe.files import read_json
from nope_probe.hooks.layers.objects import model_of

WEIGHTS, TOKENS = "model.safetensors", tokens(5, 11)


@pytest.fixture
def folder(tiny: ByName, tmp_path: Path) -> Path:
    """A copy of a valid model's folder, to be changed."""
    return Path(copytree(tiny("qwen3").folder, tmp_path / "model"))


ADAPTERS = {
    "LORA": lora("q_proj", "k_proj", lora_alpha=17),
    "LORA-with-embedding-and-head": lora(
        "v_proj", "embed_tokens", r=2, modules_to_save=["lm_head"], use_dora=True
    ),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
}

WITHOUT_MATRICES = {
    "LORA-with-new-tokens": lora(
        "q_proj", r=2, trainable_token_indices=[5, 7], rank_pattern={"q_proj": 5}
    ),
    "LN_TUNING": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
}


def write_adapter(base: Any, config: Any, folder: Path, seed: int = 3) -> peft.PeftModel:
    """Write an adapter of random numbers of a model to a folder, and return peft's own model."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(base, deepcopy(config)).eval()
    for name, parameter in adapted.named_parameters():
        if any(kind in name for kind in ("modules_to_save", "ia3", "tokens_delta", "ln_tuning")):
            parameter.requires_grad_(False).add_(0.3 * torch.randn(parameter.shape))
    adapted.save_pretrained(str(folder))
    return adapted


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_merged_in_turn_into_the_base_that_the_first_names(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    inputs, places = tokens(5), [tmp_path / "first", tmp_path / "second"]
    model: Any = plain(folder)
    for seed, (place, name) in enumerate(zip(places, (kind, "LORA"), strict=True)):
        model = write_adapter(model, ADAPTERS[name], place, seed).merge_and_unload()
        model.name_or_path = model.config._name_or_path = str(folder)
    loaded = load(adapter=places)
    assert distance(loaded.model(inputs), model(inputs).logits) <= NETWORK
    assert loaded.info.adapter == f"{kind.partition('-')[0]} + LORA"
    assert load(str(folder), adapter=places[0]).info.source == str(folder)
    with pytest.raises(UserError, match=r"holds no adapter: it has no adapter_config\.json"):
        load(adapter=folder)


@pytest.mark.parametrize("base", [None, "", "../base"])
def test_the_base_that_an_adapter_names_is_read_only_where_no_base_is_given(
    base: str | None, folder: Path, tmp_path: Path
) -> None:
    model = write_adapter(plain(folder), ADAPTERS["IA3"], tmp_path / "adapter")
    described = tmp_path / "adapter" / "adapter_config.json"
    fields = read_json(described) | {"base_model_name_or_path": base}
    described.write_text(json.dumps(fields))
    loaded = load(folder, adapter=tmp_path / "adapter")
    assert distance(loaded.model(tokens(5)), model(tokens(5)).logits) <= NETWORK
    with pytest.raises(UserError, match=r"name (it|the base model) with --model"):
        load(adapter=tmp_path / "adapter")


def test_an_adapter_may_add_tokens_and_bring_their_tokenizer(folder: Path, tmp_path: Path) -> None:
    base = plain(folder)
    base.resize_token_embeddings(271, mean_resizing=False)
    known = AutoTokenizer.from_pretrained(folder)
    known.add_tokens([f"<new{n}>" for n in range(8)])
    place = tmp_path / "adapter"
    known.save_pretrained(place)
    model = write_adapter(base, ADAPTERS["LORA"], place)
    loaded = load(folder, adapter=place)
    new = torch.tensor([[5, 263, 270, 1]])
    assert distance(loaded.model(new), model(new).logits) <= NETWORK
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("<new7>")["input_ids"][-1] == 270


@pytest.mark.parametrize("kind", ADAPTERS | WITHOUT_MATRICES)
def test_an_adapter_in_the_folder_is_merged_into_the_weights(kind: str, folder: Path) -> None:
    base, inputs = plain(folder)(tokens(5)).logits, tokens(5)
    tuned = write_adapter(plain(folder), (ADAPTERS | WITHOUT_MATRICES)[kind], folder)
    expected = tuned(inputs).logits
    loaded = load(str(folder))
    assert loaded.info.adapter == kind.partition("-")[0]
    assert distance(loaded.model(inputs), expected) <= NETWORK
    assert distance(load(tuned).model(inputs), expected) <= NETWORK
    assert distance(base, expected) > 0.01
    if kind != "LORA-with-embedding-and-head":  # whose DoRA transformers 5.23 leaves out
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert distance(loaded.model(inputs), theirs(inputs).logits) <= NETWORK


def test_a_head_that_is_tied_to_an_adapted_embedding_keeps_its_numbers(folder: Path) -> None:
    fields = read_json(folder / "config.json") | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    stored = load_file(folder / WEIGHTS)
    del stored["lm_head.weight"]
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    tuned = write_adapter(plain(folder), lora("embed_tokens"), folder)
    expected = tuned(tokens(5)).logits
    for loaded in (load(folder), load(tuned)):
        assert distance(loaded.model(tokens(5)), expected) <= NETWORK


def test_the_first_layers_have_their_part_of_the_adapter(folder: Path) -> None:
    expected = write_adapter(plain(folder), ADAPTERS["LORA"], folder)
    hidden = expected(tokens(5), output_hidden_states=True).hidden_states[1]
    loaded = load(str(folder), n_layers=1)
    _, cache = loaded.model.run_with_cache(tokens(5), names_filter="blocks.0.hook_resid_post")
    assert distance(cache["blocks.0.hook_resid_post"], hidden) <= NETWORK


def test_an_adapter_without_peft_is_refused_with_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(plain(folder), ADAPTERS["LORA"], folder)
    monkeypatch.setattr("nope_probe.models.weights.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package peft: pip install peft"):
        load(str(folder))


def test_an_adapter_alone_is_refused_with_the_name_of_its_base(
    folder: Path, tmp_path: Path
) -> None:
    write_adapter(plain(folder), ADAPTERS["LORA"], folder)
    (folder / "config.json").unlink()
    with pytest.raises(
        UserError, match=r"holds an adapter alone: --adapter .* loads its base model, "
    ):
        load(str(folder))


def test_an_adapter_that_is_not_of_the_model_is_refused(
    folder: Path,
) -> None:
    write_adapter(plain(folder), ADAPTERS["LORA"], folder)
    file = folder / "adapter_model.safetensors"
    stored = load_file(file)
    name = min(stored)
    save_file({key: value for key, value in stored.items() if key != name}, file)
    with pytest.raises(UserError, match=rf"the adapter of {folder} lacks weights, such as {name}"):
        load(str(folder))
    other = name.replace("q_proj", "g_proj").replace("k_proj", "g_proj")
    save_file(stored | {other: stored[name].clone()}, file)
    with pytest.raises(UserError, match=r"tensors that a Qwen3ForCausalLM does not use, such as"):
        load(str(folder))
    assert load(str(folder), allow_unused=True).info.unused == (other,)


def test_an_adapter_that_peft_does_not_merge_is_refused_in_one_line(tiny: ByName) -> None:
    activated = peft.LoraConfig(
        r=2, target_modules=["q_proj"], alora_invocation_tokens=[3, 5], task_type="CAUSAL_LM"
    )
    with pytest.raises(UserError, match=r"aLoRA does not support safe merging") as refused:
        model_of(peft.get_peft_model(deepcopy(tiny("llama").hf), activated))
    assert "\n" not in str(refused.value)


def test_adapters_that_are_off_are_left_out_and_their_matrices_are_not_shared(
    tiny: ByName,
) -> None:
    hf = deepcopy(tiny("llama").hf)
    expected, model = plain_losses(hf, TOKENS), adapted(deepcopy(hf))
    with model.disable_adapter():
        assert distance(capture_losses(model, TOKENS), expected) <= NETWORK
    model.merge_adapter()
    assert distance(capture_losses(model, TOKENS), plain_losses(model, TOKENS)) <= NETWORK


def test_an_adapter_in_a_bridge_that_the_user_made_is_part_of_its_weights(tiny: ByName) -> None:
    config = lora("q_proj", "o_proj", r=2, lora_dropout=0.5)
    tuned = peft.get_peft_model(deepcopy(tiny("llama").hf), config).eval()
    merged = deepcopy(tuned).merge_and_unload()
    bridge = users_bridge(tiny("llama"), tuned.get_base_model())
    removed = Ablation(remove=["w_q", "w_o"], replacement="identity", gain="norm")
    dropped = [module for module in tuned.modules() if type(module) is nn.Dropout]
    for module in dropped:
        module.train()
    with ablated(bridge, removed), ablated(merged, removed) as expected:
        assert distance(capture_losses(bridge, TOKENS), capture_losses(expected, TOKENS)) <= NETWORK
    assert [module.training for module in dropped] == [True] * 4


@pytest.mark.parametrize(
    ("name", "target"),
    [("gpt2", "c_attn"), ("phi3", "qkv_proj"), ("phi3", "gate_up_proj")],
)
def test_a_bridge_of_the_users_that_lost_an_adapter_is_refused(
    tiny: ByName, name: str, target: str
) -> None:
    config = lora(target, r=2, fan_in_fan_out=name == "gpt2")
    tuned = peft.get_peft_model(deepcopy(tiny(name).hf), config).eval()
    with torch.no_grad():
        expected = tuned(TOKENS).logits
        assert distance(load(tuned).model(TOKENS), expected) <= NETWORK
        bridge = users_bridge(tiny(name), tuned.get_base_model())
        assert distance(bridge(TOKENS), expected) > 0.1
    for given in (bridge, tuned):  # a bridge changes the model that it is made of
        with pytest.raises(UserError, match=r"without the adapter .*: load that again"):
            capture_losses(given, TOKENS)
