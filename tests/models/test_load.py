"""Loaded and converted models equal plain transformers; tests/ci has every decoder."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from support.decoder_errors import map_error, removals_of
from support.decoders import write_decoder
from support.edited_model import edited
from support.rounding import NETWORK
from support.tiny_models import (
    ByName,
    ModelOf,
    distance,
    plain,
    randomised,
    smollm3_config,
    tokens,
)

from nope_probe import UserError, capture_scores, load, sequences
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.components import components
from nope_probe.models.context import WITHOUT_ROPE
from nope_probe.models.info import stated_info
from nope_probe.models.load import to_hooked
from nope_probe.models.names import CHECKPOINTS, resolve
from nope_probe.models.parameter_free import hooked_config


def test_converting_leaves_the_model_as_it_is() -> None:
    hf, inputs = randomised(smollm3_config([1, 1])).train().requires_grad_(True), tokens(5)
    before = hf(inputs).logits
    modules = [type(module) for module in hf.modules()]
    assert distance(to_hooked(hf)(inputs), before) <= NETWORK
    assert [type(module) for module in hf.modules()] == modules
    assert hf.training
    assert all(parameter.requires_grad for parameter in hf.parameters())
    assert hf(inputs).logits.equal(before)


def test_converting_a_model_with_rope_in_some_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="RoPE in all layers or in none; use a bridge"):
        hooked_config(smollm3_config([1, 0]))


@pytest.mark.parametrize(("name", "rope"), [("nope-tiny", False), ("ROPE-tiny", True)])
def test_shipped_models_load_by_name_in_any_case_and_equal_the_files_on_disk(
    name: str, rope: bool, kind: str
) -> None:
    loaded = load(name)
    assert loaded.info.kind == kind == type(loaded.model).__name__
    assert loaded.info.rope_layers == (rope,) * 4
    assert loaded.tokenizer is not None
    inputs = loaded.tokenizer("def f(x):\n    return x", return_tensors="pt")["input_ids"]
    assert inputs[0, 0] == loaded.tokenizer.bos_token_id
    expected = plain(CHECKPOINTS[name.lower()])(inputs).logits
    assert distance(loaded.model(inputs), expected) <= NETWORK


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_shipped_model_is_what_its_configuration_states_before_it_is_loaded(name: str) -> None:
    loaded, stated = load(name), stated_info(name)
    for size in ("n_layers", "depth", "n_heads", "n_kv_heads", "d_model", "n_ctx", "rope_layers"):
        assert getattr(stated, size) == getattr(loaded.info, size), size
    rope = ("rope",) if any(stated.rope_layers) else ()
    assert components(loaded.model) == ("mask", *rope, "w_q", "w_k", "w_o", "w_v", "mlp")


@pytest.mark.parametrize("name", ["smollm3", "qwen3", "gemma2"])
def test_maps_of_the_first_layers_equal_those_of_the_whole_model(
    name: str, tiny: ByName, bridge: ByName
) -> None:
    inputs, n = tokens(3), len(layers_of(bridge(name))) - 1
    part = load(str(tiny(name).folder), n_layers=n)
    assert part.info.n_layers == len(layers_of(part.model)) == n
    whole = capture_scores(bridge(name), inputs, layers=range(n), n_folds=1).mean
    actual = capture_scores(part.model, inputs, n_folds=1).mean
    assert torch.equal(actual.nan_to_num(), whole.nan_to_num())


def test_the_papers_checkpoint_is_loaded_with_rope_off(
    tiny: ByName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, llama = "starmpcc/NoPE_1.5B_FW_EDU_15T", tiny("llama")
    assert {resolve(item).lower() for item in ("nope-1.5b", "tinyllama-nope")} <= {*WITHOUT_ROPE}
    copytree(llama.folder, tmp_path / name)
    copytree(llama.folder, tmp_path / "with-rope")
    monkeypatch.chdir(tmp_path)
    unrotated = load(name)
    assert unrotated.info.rope_layers == (False, False)
    assert load("./with-rope").info.rope_layers == (True, True)
    expected = edited(llama.hf, ["rope"])(llama.tokens).logits
    assert distance(unrotated.model(llama.tokens), expected) <= NETWORK


@pytest.mark.parametrize("tokens_left", [("eos_token",), ()])
def test_a_tokenizer_keeps_the_special_tokens_that_it_has_on_disk(
    tokens_left: tuple[str, ...], tiny: ByName, tmp_path: Path
) -> None:
    folder = Path(copytree(tiny("llama").folder, tmp_path / "model"))
    path = folder / "tokenizer_config.json"
    about = json.loads(path.read_text())
    for name in {"bos_token", "eos_token"} - {*tokens_left}:
        about.pop(name)
    path.write_text(json.dumps(about))
    loaded = load(str(folder))
    assert loaded.tokenizer.bos_token is None
    assert ("eos_token" in tokens_left) == (loaded.tokenizer.eos_token is not None)
    for bos in ("auto", "never"):
        made = sequences("random", tokenizer=loaded.tokenizer, n_seqs=3, seq_len=7, bos=bos)
        assert not made.bos
        assert made.inputs.shape == (3, 7)
        loaded.model(made.inputs)
    with pytest.raises(UserError, match="--bos always: the model's tokenizer has no BOS token"):
        sequences("random", tokenizer=loaded.tokenizer, n_seqs=3, seq_len=7, bos="always")


@pytest.mark.parametrize(
    ("name", "context"), [("parameter-free", 4096), ("rope-tiny", 256), ("folder", 64)]
)
def test_a_context_can_be_lengthened_and_never_shrinks(
    name: str, context: int, tiny: ByName
) -> None:
    name = str(tiny("llama").folder) if name == "folder" else name
    for n_ctx, expected in ((None, context), (7, context), (context + 5, context + 5)):
        loaded = load(name, n_ctx=n_ctx, n_layers=1)
        assert loaded.model.cfg.n_ctx == expected
        if name == "rope-tiny" or n_ctx is None:
            assert loaded.info.n_ctx == expected


def test_a_table_of_positions_cannot_be_lengthened(tiny: ByName) -> None:
    assert load(str(tiny("gpt2").folder), n_ctx=64).model.cfg.n_ctx == 64
    with pytest.raises(UserError, match="beyond the model's context 64, where its table of"):
        load(str(tiny("gpt2").folder), n_ctx=65)


def test_a_bert_that_is_a_decoder_attends_causally(decoder: ModelOf) -> None:
    """TransformerLens calls any BERT an encoder."""
    model, tiny = decoder("bert")
    assert model.cfg.attention_dir == "causal"
    maps = capture_scores(model, tiny.tokens, n_folds=1).mean
    causal = torch.ones(maps.shape[-2:]).tril().bool()
    assert torch.equal(maps.isfinite(), causal.expand_as(maps))


@pytest.mark.parametrize("name", ["nope-tiny", "parameter-free", "folder"])
def test_a_model_has_the_precision_that_is_asked_for_and_float32_by_default(
    name: str, tiny: ByName
) -> None:
    name = str(tiny("llama").folder) if name == "folder" else name
    for dtype in (None, torch.float64):
        loaded = load(name, n_layers=1, dtype=dtype)
        found = {parameter.dtype for parameter in loaded.model.parameters()}
        assert found == {dtype or torch.float32}
        assert max(loaded.info.parity.values()) <= 1e-5
    if name in CHECKPOINTS:
        assert (loaded.info.name, loaded.info.source) == (name, name)
        assert loaded.model.cfg.model_name == name
        assert loaded.info.architecture == "SmolLM3ForCausalLM"


# ALiBi, soft cap and window, sinks, fused, learned positions, norms of q and k, hybrid, NoPE.
KINDS = ("bloom", "gemma2", "gpt_oss", "phi3", "opt", "qwen3", "qwen3_next", "smollm3")


@pytest.mark.parametrize("name", KINDS)
def test_maps_are_plain_transformers_own_intact_and_without_each_component(
    name: str, decoder: ModelOf
) -> None:
    model, tiny = decoder(name)
    errors = {removal: map_error(model, tiny, removal) for removal in removals_of(tiny)}
    assert max(errors.values()) <= NETWORK, errors


def test_keys_that_are_selected_for_each_query_are_refused(tmp_path: Path) -> None:
    tiny = write_decoder("glm_moe_dsa", tmp_path, index_topk=7)
    with pytest.raises(UserError, match="beyond 7 tokens"):
        load(str(tiny.folder))
