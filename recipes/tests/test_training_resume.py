"""Training resumes its own run, to the same bytes, and overwrites nothing."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from ci.failures import files_of_at_most
from safetensors.torch import load_file
from short_training import SHORT, short_corpus, shorten_training
from support.rounding import NETWORK
from transformers import (
    AutoModelForCausalLM,
    SmolLM3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    set_seed,
)

import trainer as trainer_module
from nope_probe import difference, run_ablations
from nope_probe.errors import StorageError, UserError
from nope_probe.run.processes import Interrupted, locked
from presets import RECIPES, Settings, split_batch
from trainer import log_spaced, model_card
from training_run import run, smollm3_config


@pytest.fixture(autouse=True, scope="module")
def short_training():
    with pytest.MonkeyPatch.context() as patch:
        shorten_training(patch.setattr, patch.setitem)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train") / "run"
    run(Settings(preset="nope-tiny", out=out))
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def resume(out: Path, **given: object) -> None:
    run(Settings(**({"preset": "nope-tiny", "out": out, "resume": True} | given)))


@pytest.fixture
def unfinished(copy: Path) -> Path:
    """A folder as a process leaves it that is killed while the model is saved."""
    for name in ("training.json", "README.md", "model.safetensors"):
        (copy / name).unlink()
    return copy


def results(out: Path) -> list[bytes]:
    names = ("model.safetensors", "training.json", "README.md", "dynamics.csv")
    return [(out / name).read_bytes() for name in names]


def test_a_run_leaves_a_folder_that_plain_transformers_loads(finished: Path):
    model = AutoModelForCausalLM.from_pretrained(finished, dtype=torch.float32)
    assert model.config.no_rope_layers == [0, 0, 0, 0]
    tokens = short_corpus().held_out[:]["input_ids"]
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    # The published loss is that of the bf16 weights on disk.
    record = json.loads((finished / "training.json").read_text())
    assert float(loss) == pytest.approx(record["held_out_loss"], rel=NETWORK)
    assert load_file(finished / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert f"{record['held_out_loss']:.3f} nats" in (finished / "README.md").read_text()
    assert record["recipe"]["seq_len"] == SHORT.seq_len
    dynamics = pd.read_csv(finished / "dynamics.csv")
    assert sorted(set(dynamics["step"])) == sorted(log_spaced(5))
    assert sorted(set(dynamics["layer"])) == [0, 1, 2, 3]
    assert dynamics["amplitude"].notna().all()


@pytest.fixture(scope="module")
def with_snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train") / "run"
    run(Settings(preset="nope-tiny", out=out, snapshots=(5, 0, 3)))
    return out


def test_snapshots_are_models_and_the_last_is_the_trained_model_to_the_byte(
    with_snapshots: Path, finished: Path
):
    assert results(with_snapshots) == results(finished), "snapshots do not change the training"
    assert sorted(path.name for path in with_snapshots.glob("step-*")) == [
        "step-0",
        "step-3",
        "step-5",
    ]
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        last, trained = (folder / name for folder in (with_snapshots / "step-5", finished))
        assert last.read_bytes() == trained.read_bytes(), name
    set_seed(0)
    config = smollm3_config("tiny", rope=False)
    untrained = SmolLM3ForCausalLM(config).state_dict()
    stored = load_file(with_snapshots / "step-0" / "model.safetensors")
    for name, weights in stored.items():
        assert weights.equal(untrained[name].bfloat16()), name


def test_a_command_takes_a_snapshot_and_a_series_has_its_steps(with_snapshots: Path):
    runs = [
        run_ablations(
            str(with_snapshots / f"step-{step}"), n_seqs=8, seq_len=11, folds=4, remove="sources"
        )
        for step in (5, 0, 3)
    ]
    table = difference(*runs)
    assert [*table.columns[:2]] == ["run", "step"]
    assert [*table["step"].unique()] == [0, 3, 5]
    assert {*table["method"].dropna()} == {"paired"}


def test_a_resumed_run_keeps_the_snapshots_that_are_left(with_snapshots: Path, tmp_path: Path):
    out = Path(shutil.copytree(with_snapshots, tmp_path / "run"))
    for name in ("step-5", "checkpoint-5"):
        shutil.rmtree(out / name)
    for name in ("training.json", "model.safetensors"):
        (out / name).unlink()
    earlier = {path: path.stat().st_mtime_ns for path in out.glob("step-[03]/*")}
    with pytest.raises(UserError, match="holds a run with another snapshots"):
        resume(out, snapshots=(5,))
    resume(out, snapshots=(5, 0, 3))
    last, expected = (of / "step-5" / "model.safetensors" for of in (out, with_snapshots))
    assert last.read_bytes() == expected.read_bytes()
    assert {path: path.stat().st_mtime_ns for path in out.glob("step-[03]/*")} == earlier


def write_half_a_checkpoint(out: Path) -> None:
    (out / "checkpoint-5" / "checksums.json").unlink()
    for name in ("optimizer.pt", "trainer_state.json"):
        (out / "checkpoint-5" / name).write_bytes(b"")


def begin_the_first_checkpoint(out: Path) -> None:
    for step in (4, 5):
        shutil.rmtree(out / f"checkpoint-{step}")
    (out / "checkpoint-2").mkdir()


@pytest.mark.parametrize("killed", [None, write_half_a_checkpoint, begin_the_first_checkpoint])
def test_a_killed_run_resumes_from_its_last_whole_checkpoint_to_the_same_bytes(
    killed: Callable[[Path], None] | None, finished: Path, unfinished: Path
):
    if killed is not None:
        killed(unfinished)
    resume(unfinished)
    assert results(unfinished) == results(finished)
    assert "5 steps of 44 tokens" in (unfinished / "README.md").read_text()
    assert (unfinished / "checkpoint-5" / "checksums.json").is_file()


def test_a_finished_run_stays_as_it_is_and_other_settings_are_refused(copy: Path):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    resume(copy)
    for name, value, was in (("preset", "rope-tiny", "nope-tiny"), ("seed", 1, 0), ("steps", 3, 5)):
        what = rf"holds a run with another {name} \({name} {was}\); choose another --out"
        with pytest.raises(UserError, match=what):
            resume(copy, **{name: value})
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    for checkpoint in copy.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match="holds other files; take --resume, or choose"):
        resume(copy, resume=False)
    assert (copy / "model.safetensors").is_file()


def test_a_changed_or_swapped_checkpoint_is_refused(unfinished: Path):
    last = unfinished / "checkpoint-5"
    content = bytearray((last / "model.safetensors").read_bytes())
    content[-7] ^= 1
    (last / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="checkpoint-5 is not the checkpoint that this run wrote"):
        resume(unfinished)
    shutil.rmtree(last)
    (unfinished / "checkpoint-4").rename(last)
    with pytest.raises(UserError, match="checkpoint-5 is not the checkpoint that this run wrote"):
        resume(unfinished)


def test_checkpoints_of_an_unknown_run_and_broken_records_are_refused(copy: Path):
    for content in ("", "[]", "[" * 100_000):
        (copy / "run.json").write_text(content)
        with pytest.raises(UserError, match=r"run\.json is broken; remove .* and train again"):
            resume(copy)
    (copy / "run.json").unlink()
    with pytest.raises(UserError, match="holds checkpoints of an unknown run"):
        resume(copy)


@pytest.mark.parametrize("recipe", ["tiny", "1.5b"])
@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_processes_share_the_recipes_batch(recipe: str, n_processes: int):
    chosen = RECIPES[recipe]
    size, n_passes = split_batch(chosen, n_processes)
    assert size <= chosen.micro_batch
    assert size * n_passes * n_processes * chosen.seq_len == chosen.batch_tokens


def test_a_batch_that_processes_cannot_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="the 4 sequences of a step cannot be shared equally by 3"):
        run(Settings(preset="nope-tiny", out=tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_the_card_says_how_many_processes_shared_a_step(finished: Path):
    record = json.loads((finished / "training.json").read_text())
    assert record["processes"] == 1
    assert "processes" not in model_card(record, 5)
    assert "each step shared by 2 processes" in model_card(record | {"processes": 2}, 5)


def test_another_process_or_another_corpus_does_not_continue_a_run(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        locked(unfinished.parent / f".{unfinished.name}.unfinished"),
        pytest.raises(UserError, match="another process is at work on the run in"),
    ):
        resume(unfinished)
    other = short_corpus(seed=2)
    monkeypatch.setattr("training_run.corpus_of", lambda *_: other)
    with pytest.raises(UserError, match="holds a run with another corpus"):
        resume(unfinished)
    assert not (unfinished / "model.safetensors").exists()
    assert [path.name for path in unfinished.parent.iterdir()] == [unfinished.name]


class SignalAt(TrainerCallback):
    """Sends this process a signal within a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_a_checkpoint_after_the_step_and_training_resumes_to_the_same_bytes(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, made = tmp_path / "run", trainer_module.make_trainer

    def make(*args: object, **kwargs: object) -> Trainer:
        trainer = made(*args, **kwargs)
        trainer.add_callback(SignalAt(2))
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr("training_run.make_trainer", make)
        with pytest.raises(Interrupted, match="run the same command with --resume to resume"):
            run(Settings(preset="nope-tiny", out=out))
    assert (out / "checkpoint-3" / "checksums.json").is_file()
    assert not (out / "model.safetensors").exists()
    resume(out)
    assert results(out) == results(finished)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("n_bytes", [100_000, 4_000_000], ids=["weights", "optimizer"])
def test_a_full_disk_keeps_whole_checkpoints_and_says_so_in_one_line(
    n_bytes: int, unfinished: Path
):
    shutil.rmtree(unfinished / "checkpoint-5")
    with files_of_at_most(n_bytes), pytest.raises(StorageError, match=r"cannot write to .*/run: "):
        resume(unfinished)
    assert not (unfinished / "training.json").exists()
    assert [path.name for path in unfinished.glob("checkpoint-*")] == ["checkpoint-4"]
    assert (unfinished / "checkpoint-4" / "checksums.json").is_file()
