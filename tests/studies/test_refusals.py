"""Unsupported models: one line on stderr and exit code 2, and nothing is written."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import refused, run_command
from support.decoders import write_decoder
from support.rounding import NETWORK, assert_same, rounding
from support.tiny_models import CONFIGS, change, plain, randomised, tokens, write, write_llama

from nope_probe import ablate, behaviour, circuit, load, read_run, run_ablations, run_trace

SMALL = ["--n-seqs", "7", "--seq-len", "13", "--folds", "5", "--layers", "2", "--data", "random"]


def trap(folder: Path) -> Path:
    """Put code beside the weights that leaves a file if it is run."""
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    return folder


REMOTE = {"architectures": ["OwnForCausalLM"]}
REMOTE |= {"auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
TOKENIZER = {"tokenizer_class": "OwnTokenizer"}
TOKENIZER |= {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("config.json", REMOTE, r"needs remote code \(own\.OwnForCausalLM\), which is refused"),
        ("tokenizer_config.json", TOKENIZER, "cannot load .*model: tokenizer: "),
        ("config.json", GPTQ, r"is quantised \(gptq\), .*take the unquantised model \("),
    ],
)
def test_an_unsupported_folder_is_refused_with_the_reason(
    file: str,
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = trap(write_llama(tmp_path / "model"))
    change(folder, file, **settings)
    line = refused(capfd, tmp_path / "here", ablate, *SMALL, "--model", folder)
    assert re.search(message, line)
    assert not (folder / "ran").exists()


def test_models_and_blocks_that_do_not_attend_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here, mamba = tmp_path / "here", write_decoder("mamba", tmp_path).folder
    line = refused(capfd, here, ablate, *SMALL, "--model", mamba)
    assert "has no attention in a form that can be read" in line
    asked = ["--model", write_decoder("qwen3_next", tmp_path).folder, "--data", "random"]
    line = refused(capfd, here, circuit, *asked, "--n-seqs", 8, "--seq-len", 11, "--layer", 2)
    assert line.endswith("does not attend; L1, L3 do")


LATENT = (
    "Not removed by default: {} (it is no separate matrix (as in multi-head latent attention))."
)


def test_defaults_leave_out_weights_that_are_no_matrices_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", write_decoder("deepseek_v3", tmp_path).folder]
    run_command(ablate, *model, *SMALL, "--out", tmp_path / "ablate")
    small = ["--n-seqs", 16, "--seq-len", 16, "--measures", "loss", "--replacement", "mean"]
    small += ["--remove", "sources", "weights"]
    run_command(behaviour, *model, *small, "--out", tmp_path / "behaviour")
    note, shown = LATENT.format("W_Q, W_K, W_V"), " ".join(capsys.readouterr().out.split())
    assert shown.count(note) == 2
    for name in ("ablate", "behaviour"):
        assert [*read_run(tmp_path / name).manifest.results["left_out"]] == ["w_q", "w_k", "w_v"]
        assert note in (tmp_path / name / "report.html").read_text()
    pattern = read_run(tmp_path / "ablate").tables["pattern"]
    names = ["intact", "mask", "written", "rope", "mask+rope", "w_o"]
    assert [*pattern["removed"].unique()][:6] == names
    losses = read_run(tmp_path / "behaviour").tables["behaviour"]
    assert {*losses["removed"]} == {"intact", "rope", "mask", "w_o", "mlp", "mask+rope"}


def test_a_model_of_fewer_layers_than_are_studied_by_default_is_studied_whole(
    tmp_path: Path,
) -> None:
    folder = write_llama(tmp_path / "model")
    sizes = {"n_seqs": 8, "seq_len": 13, "folds": 4, "data": "random"}
    assert run_ablations(str(folder), remove="none", **sizes).manifest.layers == (0, 1)
    inputs = torch.randint(1, 60, (9, 11), generator=torch.Generator().manual_seed(0))
    run = run_trace(str(folder), inputs, confirm=0, out=tmp_path / "trace")
    assert run.manifest.model.n_layers == 2
    whole = run_trace(str(folder), inputs, confirm=0, layers="all").tables["terms"]
    pd.testing.assert_frame_equal(run.tables["terms"], whole)
    assert load("rope-tiny").info.n_layers == 4
    six = write_decoder("llama", tmp_path / "six", num_hidden_layers=6).folder
    assert run_trace(str(six), inputs, confirm=0).manifest.model.n_layers == 4


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("phi3", "Phi3ForCausalLM"),  # whose folder brings the code that transformers has by now
        ("mpt", "MPTForCausalLM"),  # which transformers spells otherwise
        ("phimoe", "PhiMoEForCausalLM"),
    ],
)
def test_code_beside_weights_that_transformers_has_itself_is_left_alone(
    kind: str, name: str, tmp_path: Path
) -> None:
    folder = trap(write_decoder(kind, tmp_path).folder)
    change(folder, architectures=[name], auto_map={"AutoModelForCausalLM": f"own.{name}"})
    assert load(str(folder)).info.architecture.lower() == name.lower()
    assert not (folder / "ran").exists()


def test_a_tokenizer_that_knows_fewer_tokens_than_are_embedded_is_fine(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.vocab_size = 271
    folder = write(tmp_path / "model", randomised(config))
    loaded = load(str(folder))
    assert loaded.tokenizer is not None
    assert (len(loaded.tokenizer), loaded.info.d_vocab) == (263, 271)


def fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Write a Llama whose projections are 8-bit floats with a scale per block of 128 x 128.

    Return the plain weights that they encode.
    """
    file = write_llama(folder) / "model.safetensors"
    stored, meant = {}, {}
    for name, weight in load_file(file).items():
        stored[name] = meant[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / 448  # the largest number of float8_e4m3fn
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            meant[name] = stored[name].float() * scale
    save_file(stored, file, metadata={"format": "pt"})
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    change(folder, quantization_config=said)
    return meant


def test_a_quantised_checkpoint_is_read_as_its_plain_weights(tmp_path: Path) -> None:
    folder, name = tmp_path / "model", "self_attn.q_proj.weight"
    meant = fp8(folder)
    truth = plain(write_llama(tmp_path / "plain"))
    before = truth.state_dict()[f"model.layers.0.{name}"].clone()
    truth.load_state_dict(meant)
    assert (before - meant[f"model.layers.0.{name}"]).abs().max() > 1e-3, "rounded"
    loaded, windows = load(str(folder)), tokens(5)
    assert_same(loaded.model(windows), truth(windows).logits)
    assert max(loaded.info.parity.values()) <= NETWORK
    first: Any = load(str(folder), n_layers=1).model
    weight = first.blocks[0].attn.q.original_component.weight
    assert_same(weight, meant[f"model.layers.0.{name}"], rounding(1))
