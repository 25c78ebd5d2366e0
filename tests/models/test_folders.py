"""All of a model's folder is read, or refused in a line that says what to do."""

import shlex
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.command_line import refused, run_command
from support.decoders import write_decoder
from support.rounding import NETWORK
from support.tiny_models import (
    CONFIGS,
    ByName,
    distance,
    plain,
    randomise,
    randomised,
    tokenizer,
    tokens,
)

from nope_probe import UserError, ablate, capture_scores, load, sequences
from nope_probe.files import read_json

WEIGHTS = "model.safetensors"
RUN = ("--data", "random", "--n-seqs", 8, "--seq-len", 16, "--layers", 1)


@pytest.fixture
def folder(tiny: ByName, tmp_path: Path) -> Path:
    """A copy of a valid model's folder, to be changed."""
    return Path(copytree(tiny("qwen3").folder, tmp_path / "model"))


def seeing() -> Any:
    """Return a tiny LLaVA-NeXT, whose text decoder is a Granite."""
    text = transformers.GraniteConfig(
        **{"vocab_size": 263, "hidden_size": 48, "intermediate_size": 37, "bos_token_id": 0},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"eos_token_id": 0, "pad_token_id": 1, "logits_scaling": 7.0},
    )
    sees = {"hidden_size": 16, "intermediate_size": 17, "num_hidden_layers": 1}
    sees |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.LlavaNextConfig(text_config=text, vision_config=sees)
    return randomise(transformers.LlavaNextForConditionalGeneration(config))


def test_only_the_text_decoders_tensors_have_to_be_in_the_files(tmp_path: Path) -> None:
    hf, file, inputs = seeing(), tmp_path / WEIGHTS, tokens(5)
    hf.save_pretrained(tmp_path)
    expected = hf(input_ids=inputs).logits  # which GraniteForCausalLM divides by 7
    stored = load_file(file)
    norm, seen = (next(key for key in stored if part in key) for part in ("norm.weight", "vision"))
    others = {key: value for key, value in stored.items() if key != seen}
    save_file(others | {"heard.weight": stored[norm].clone()}, file, {"format": "pt"})
    for loaded in (load(tmp_path), load(hf)):
        assert distance(loaded.model(inputs), expected) <= NETWORK
        assert loaded.info.architecture.startswith("GraniteForCausalLM, the text decoder of")
        assert loaded.info.unused == ()
    block = next(key for key in stored if "layers.2" in key and "vision" not in key)
    sinks = block.partition("layers.2.")[0] + "layers.2.self_attn.sinks"
    save_file(stored | {sinks: stored[norm].clone()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"does not use, such as .*sinks"):
        load(tmp_path)
    save_file({key: stored[key] for key in stored if key != block}, file, {"format": "pt"})
    with pytest.raises(
        UserError, match=f"lacks weights, such as .*{block.rpartition('layers')[2]}"
    ):
        load(tmp_path)
    assert load(tmp_path, n_layers=2).info.n_layers == 2


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.sinks", "model.layers.1.pre_norm.weight", "score.weight"]
)
def test_a_tensor_that_the_model_does_not_use_is_refused_or_named_in_the_manifest(
    name: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stored = load_file(folder / WEIGHTS)
    save_file(stored | {name: torch.ones(6)}, folder / WEIGHTS, metadata={"format": "pt"})
    line = refused(capfd, tmp_path / "runs", ablate, "--model", folder, *RUN, "--layers", 2)
    assert line.startswith(f"{folder} has tensors that a Qwen3ForCausalLM does not use, such as")
    flags = ["--remove", "none", "--layers", 2, "--allow-unused", "--out", tmp_path / "run"]
    run_command(ablate, "--model", folder, *RUN, *flags)
    manifest = read_json(tmp_path / "run" / "manifest.json")
    assert manifest["model"]["unused"] == [name]
    assert manifest["settings"]["allow_unused"] is True


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("gpt2", "transformer.h.0.attn.bias"), ("gptj", "transformer.h.1.attn.masked_bias")],
)
def test_stored_causal_masks_and_frequencies_are_no_tensors_that_are_left_out(
    model_type: str, name: str, tmp_path: Path
) -> None:
    file = write_decoder(model_type, tmp_path).folder / WEIGHTS
    save_file(load_file(file) | {name: torch.ones(7)}, file, metadata={"format": "pt"})
    assert load(str(file.parent)).info.unused == ()


def test_the_context_of_mpt_is_its_configurations(tmp_path: Path) -> None:
    loaded = load(str(write_decoder("mpt", tmp_path, max_seq_len=37).folder))
    assert (loaded.info.n_ctx, loaded.model.cfg.n_ctx) == (37, 37)


def test_a_model_without_tokenizer_runs_on_random_tokens_and_on_given_ones(
    tiny: ByName, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    loaded, inputs = load(str(folder)), tokens(7)
    assert (loaded.tokenizer, loaded.model.cfg.model_name) == (None, str(folder))
    expected = capture_scores(load(str(tiny("qwen3").folder)).model, inputs, n_folds=1).mean
    actual = capture_scores(loaded.model, inputs, n_folds=1).mean
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
    run_command(ablate, "--remove", "none", "--model", folder, *RUN, "--out", tmp_path / "run")
    assert read_json(tmp_path / "run" / "manifest.json")["data"]["name"] == "random"
    drawn = sequences("random", tokenizer=None, d_vocab=loaded.info.d_vocab, n_seqs=101).inputs
    assert drawn.unique().tolist() == list(range(loaded.info.d_vocab))
    line = refused(capfd, tmp_path / "runs", ablate, "--model", folder, "--layers", 1)
    assert line.startswith("a model without tokenizer takes no text: use --data random")


def test_added_special_tokens_beyond_the_embedding_are_never_drawn(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = tokenizer()
    made.add_special_tokens({"pad_token": "<pad>", "extra_special_tokens": ["<turn>"]})
    made.save_pretrained(folder)
    loaded = load(str(folder))
    assert len(loaded.tokenizer) == loaded.info.d_vocab + 2
    drawn = sequences("random", tokenizer=loaded.tokenizer, n_seqs=101).inputs
    assert int(drawn.max()) == loaded.info.d_vocab - 1
    rows = "".join(f'{{"text": "{n} {"a<turn>b" * 99}"}}\n' for n in range(8))
    (tmp_path / "text.jsonl").write_text(rows)
    flags = ("--data", tmp_path / "text.jsonl", "--n-seqs", 8, "--seq-len", 16, "--layers", 1)
    line = refused(capfd, tmp_path / "runs", ablate, "--model", folder, *flags)
    assert line == "token 264: the model's tokens are from 0 to 262"


def test_a_bos_token_beyond_the_embedding_is_refused(folder: Path) -> None:
    made = tokenizer()
    made.add_special_tokens({"bos_token": "<first>"})
    made.save_pretrained(folder)
    with pytest.raises(UserError, match="has ids up to 263, but the model embeds only 263 tokens"):
        load(str(folder))


def test_pickled_weights_are_refused_with_the_command_that_converts_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(folder)(tokens(5)).logits
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"pickled ones \(.bin\) are refused") as error:
        load(str(folder))
    python, *arguments = shlex.split(str(error.value).partition("you trust: ")[2])
    assert (python, arguments[0]) == ("python", "-c")
    monkeypatch.setattr("sys.argv", ["-c", *arguments[2:]])
    exec(arguments[1], {})
    assert distance(load(str(folder)).model(tokens(5)), expected) <= NETWORK


def test_a_folder_without_weights_is_told_so_and_nothing_of_pickled_ones(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    lacks = f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json"
    for other, only in (
        ("optimizer.pt", ""),
        ("weights.safetensors", ", only weights.safetensors"),
    ):
        (folder / other).touch()
        with pytest.raises(UserError) as error:
            load(folder)
        assert str(error.value) == lacks + only


@pytest.mark.parametrize("name", ["tiny.gguf", "Q8.GGUF"])
def test_a_folder_may_be_called_as_a_gguf_file_is(name: str, folder: Path) -> None:
    named = folder.rename(folder.parent / name)
    expected = plain(named)(tokens(5)).logits
    for given in (named, f"{named}/"):
        assert distance(load(given).model(tokens(5)), expected) <= NETWORK
    for file in ("config.json", WEIGHTS):
        (named / file).unlink()
    with pytest.raises(UserError, match=r"has no config\.json: it holds no Hugging Face model"):
        load(named)


def test_an_adapter_in_the_folder_is_part_of_the_weights_or_refused(folder: Path) -> None:
    """tests/ci/test_adapters.py has adapters of every kind."""
    base, lora = plain(folder), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    intact = base(tokens(5)).logits
    adapted = get_peft_model(base, lora).eval()
    adapted.save_pretrained(str(folder))
    loaded = load(folder)
    assert distance(loaded.model(tokens(5)), adapted(tokens(5)).logits) <= NETWORK
    assert distance(loaded.model(tokens(5)), intact) > 0.01
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(plain(folder), prompts).save_pretrained(str(folder))
    with pytest.raises(UserError, match="an adapter of the kind PROMPT_TUNING, which adds no"):
        load(folder)


def test_a_configuration_that_names_no_class_is_that_of_its_type(tmp_path: Path) -> None:
    folder = write_decoder("gemma3_text", tmp_path, architectures=None).folder
    assert load(str(folder)).info.architecture == "Gemma3ForCausalLM"
    assert randomised(CONFIGS["llama"]()).config.architectures is None
