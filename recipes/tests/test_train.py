"""Training: the recipe, a short run, its processes, and what it leaves on disk."""

import json
import re
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ci.forks import forks
from short_training import SHORT, shorten_training
from support.command_line import refused, run_command
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train
from corpus import _packed, corpus_of
from nope_probe.data.documents import is_held_out
from nope_probe.errors import UserError
from nope_probe.models.names import CHECKPOINTS
from nope_probe.models.parameter_free import hooked_config
from presets import Settings
from trainer import SayLoss, log_spaced
from training_run import SHAPES, run, smollm3_config


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINTS["nope-tiny"])


def test_the_twins_start_from_the_same_weights_and_differ_in_rope_alone():
    twins = []
    for rope in (False, True):
        torch.manual_seed(3)
        twins.append(AutoModelForCausalLM.from_config(smollm3_config("tiny", rope)))
    states = [twin.state_dict() for twin in twins]
    assert all(value.equal(states[1][name]) for name, value in states[0].items())
    tokens = torch.randint(2048, (1, 13))
    assert not twins[0](tokens).logits.equal(twins[1](tokens).logits)


def test_documents_are_packed_with_bos_between_them_and_nothing_lost(tokenizer):
    texts = ["def f(x):", "return x + 1", "import os\nimport sys\n"] * 7
    rows = list(_packed([{"text": text} for text in texts], tokenizer, SHORT))
    stream = [token for row in rows for token in row["input_ids"]]
    expected = [
        t for text in texts for t in [0, *tokenizer(text, add_special_tokens=False).input_ids]
    ]
    assert all(len(row["input_ids"]) == 11 for row in rows)
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) < 11


@pytest.mark.parametrize("rope", [False, True])
def test_the_large_shape_is_the_papers(rope):
    """Section 4.2; its MLP and vocabulary follow from 1.5B parameters and Llama 3's tokenizer."""
    config = hooked_config(smollm3_config("1.5b", rope))
    shape = (config.n_layers, config.d_model, config.d_head, config.n_heads)
    assert shape == (22, 2048, 64, 32)
    assert (config.n_key_value_heads, config.d_mlp, config.d_vocab) == (8, 5632, 128_256)
    assert (config.n_ctx, config.rotary_base) == (1024, 500_000.0)
    assert config.positional_embedding_type == ("rotary" if rope else "standard")
    assert (config.gated_mlp, config.normalization_type, config.final_rms) == (True, "RMS", True)
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(smollm3_config("1.5b", rope))
    assert sum(p.numel() for p in large.parameters()) == pytest.approx(1.5e9, rel=0.02)


@pytest.mark.parametrize("name", ["nope-tiny", "rope-tiny"])
def test_the_shipped_twins_have_the_small_shape(name):
    shipped = AutoConfig.from_pretrained(CHECKPOINTS[name]).to_dict()
    config = smollm3_config("tiny", rope=name == "rope-tiny").to_dict()
    for field in (*SHAPES["tiny"], "no_rope_layers", "bos_token_id", "eos_token_id"):
        assert shipped[field] == config[field], field


def test_measured_steps_are_log_spaced_from_first_to_last():
    steps = sorted(log_spaced(5000))
    assert steps[:3] == [0, 1, 2]
    assert steps[-1] == 5000
    assert len(steps) <= 25


def test_what_cannot_be_trained_into_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "begun" / "checkpoint-1000").mkdir(parents=True)
    for name, given, message in (
        ("file", {}, "is a file"),
        ("run", {"steps": 0}, "--steps 0 should be greater than or equal to 1"),
        ("run", {"steps": 5001}, "--steps 5001: nope-tiny has 5,000 steps"),
        ("run", {"steps": 3, "snapshots": (2, 4)}, "--snapshots 4: the training has 3 steps"),
        ("run", {"resume": True}, r"--resume: .* holds no checkpoint"),
        ("begun", {}, "holds other files; take --resume, or choose"),
    ):
        with pytest.raises(UserError, match=message):
            run(Settings(preset="nope-tiny", out=tmp_path / name, **given))


def test_training_says_in_words_what_was_trained_how_well_and_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    shorten_training(monkeypatch.setattr, monkeypatch.setitem)
    out = tmp_path / "run"
    run_command(train, "--preset", "nope-tiny", "--steps", 3, "--snapshots", 0, 2, "--out", out)
    printed = capfd.readouterr()
    loss = json.loads((out / "training.json").read_text())["held_out_loss"]
    assert printed.out.splitlines() == [
        "Trained nope-tiny for 3 steps of 44 tokens: its loss on held-out text is "
        f"{loss:.3f} nats per token.",
        f"The model is in {out}: study it with --model {out}",
        f"Snapshots are in {out}/step-N: run a command on each, and `compare` the runs.",
    ]
    state = SimpleNamespace(global_step=1000, max_steps=5000, is_world_process_zero=True)
    for logs in ({"loss": "3.14159"}, {"eval_loss": 2.0}, {"train_runtime": "7"}):
        SayLoss().on_log(None, state, None, logs=logs)
    assert capfd.readouterr().err == "step 1,000 of 5,000: loss 3.142 nats per token\n"
    assert "{" not in printed.err


def test_a_streamed_corpus_leaves_out_the_documents_that_runs_read(tmp_path: Path, tokenizer):
    texts = [f"document {i}: " + "some words and more of them, " * 9 for i in range(120)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows)
    corpus = corpus_of(replace(SHORT, data=str(tmp_path)), tokenizer, seed=0)

    def named(dataset) -> set[str]:
        ids = [t for row in dataset for t in torch.as_tensor(row["input_ids"]).tolist()]
        return set(re.findall(r"document (\d+):", tokenizer.decode(ids)))

    studied = {str(i) for i, text in enumerate(texts) if is_held_out(text)}
    assert 5 < len(studied) < 60
    held_out, trained = named(corpus.held_out), named(corpus.train)
    assert not trained & studied
    assert held_out <= studied
    # Packing drops what does not fill the last sequence.
    assert len(held_out) >= len(studied) - 1
    assert len(trained) >= 120 - len(studied) - 1


NOPE = ["short_training", "--preset", "nope-tiny"]


def test_a_process_without_the_others_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("nope_probe.run.process_group.JOIN_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr("training_run.corpus_of", None)  # not reached
    line = refused(capfd, tmp_path, train, *NOPE[1:], "--out", "run", code=1)
    assert line.startswith("2 processes did not connect within 1 s (")


def test_two_processes_train_one_model(tmp_path: Path):
    codes, stderr = forks("share", "2", tmp_path, NOPE)
    assert codes == {"2": [0, 0]}, stderr
    assert json.loads((tmp_path / "2" / "training.json").read_text())["processes"] == 2


@pytest.mark.parametrize(("failures", "codes"), [("2 1:SIGKILL", [1, -9]), ("2 0:disk", [1, 1])])
def test_where_one_fails_the_other_stops_training(failures: str, codes: list[int], tmp_path: Path):
    processes, stderr = forks("fail", failures, tmp_path, NOPE)
    assert processes == codes, stderr
    assert not (tmp_path / "2" / "training.json").exists()
