"""Names of TransformerLens resolve to Hub ids, and what it does not read is named in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from support.decoders import write_decoder
from support.fake_hub import put_into_cache
from support.rounding import NETWORK
from support.tiny_models import D_VOCAB, distance, randomised, write, write_tiny

from nope_probe import UserError, difference, load, run_ablations
from nope_probe.models.context import read_config
from nope_probe.models.huggingface import load_hugging_face
from nope_probe.models.names import resolve


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("GPT2-small", "gpt2"),
        ("EleutherAI/pythia-19m", "EleutherAI/pythia-70m"),
        ("eleutherai/gpt-j-6b", "EleutherAI/gpt-j-6B"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("NoPE-1.5B", "starmpcc/NoPE_1.5B_FW_EDU_15T"),
        ("owner/Some-Model", "owner/Some-Model"),
    ],
)
def test_a_name_in_any_case_resolves_to_its_hub_id(name: str, source: str) -> None:
    assert resolve(name) == source


def test_a_user_without_a_home_or_a_name_has_the_shipped_models() -> None:
    """A container may run under any number: no HOME, and no entry in the list of users."""
    code = "import os, pwd\npwd.getpwuid = {}.__getitem__\n"
    code += "from nope_probe.models.names import FETCHED, is_on_hub, path_of\n"
    code += "print(is_on_hub('smollm2-135m'), path_of('rope-tiny').name)"
    env = {name: os.environ[name] for name in os.environ if name not in ("HOME", "XDG_CACHE_HOME")}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert ended.stdout.split() == ["True", "rope-tiny"], ended.stderr


def test_checkpoints_of_pythia_are_read_from_a_cache_by_friendly_name_and_make_a_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    runs, flags = [], {"n_seqs": 8, "seq_len": 11, "folds": 4, "data": "random", "layers": 2}
    for seed, step in enumerate((1000, 0, 64)):
        checkpoint = write_tiny("neox", tmp_path / f"{step}", seed)
        where = {"revision": f"step{step}", "commit": f"{seed}" * 40}
        put_into_cache(tmp_path / "cache", "EleutherAI/pythia-70m", checkpoint.folder, **where)
        loaded = load("pythia-70m", revision=f"step{step}")
        with torch.inference_mode():
            logits = loaded.model(checkpoint.tokens)
        assert distance(logits, checkpoint.hf(checkpoint.tokens).logits) <= NETWORK
        runs.append(run_ablations("pythia-70m", revision=f"step{step}", remove="sources", **flags))
    table = difference(*runs)
    assert [*table["run"].unique()] == ["step 0", "step 64", "step 1000"]
    with pytest.raises(UserError, match="EleutherAI/pythia-70m is not in the local cache"):
        load("pythia-70m", revision="step7")


def test_an_architecture_that_transformer_lens_does_not_read_is_an_error_with_the_nearest(
    tmp_path: Path,
) -> None:
    config = transformers.CTRLConfig(
        vocab_size=D_VOCAB, n_embd=48, n_layer=2, n_head=6, dff=36, n_positions=64
    )
    folder = write(tmp_path, randomised(config))
    with pytest.raises(UserError, match=r"a CTRLLMHeadModel, .* not read; .* are GPT2LMHeadModel"):
        load_hugging_face(str(folder), dtype=torch.float32)


@pytest.mark.parametrize(
    ("model_type", "label"),
    [
        ("phimoe", "PhimoeForCausalLM"),  # as transformers saves it
        ("phimoe", "PhiMoEForCausalLM"),  # as on the Hub
        ("granite", "TunedGraniteForCausalLM"),  # of a subclass
        ("granite", None),
    ],
)
def test_a_class_is_read_under_any_label_from_a_folder_and_in_memory(
    model_type: str, label: str | None, tmp_path: Path
) -> None:
    tiny = write_decoder(model_type, tmp_path)
    file = tiny.folder / "config.json"
    named = {"architectures": [label] if label else None}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    tiny.hf.config.architectures = named["architectures"]
    with torch.inference_mode():
        expected = tiny.hf(tiny.tokens).logits
    for given in (tiny.folder, tiny.hf):
        assert distance(load(given).model(tiny.tokens), expected) <= NETWORK
    assert tiny.hf.config.architectures == named["architectures"]


def test_sizes_that_differ_between_layers_do_not_stop_the_reading(tmp_path: Path) -> None:
    folder = write_decoder("gemma4_text", tmp_path).folder
    assert read_config(str(folder)).num_hidden_layers == 4
