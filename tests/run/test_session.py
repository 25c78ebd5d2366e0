"""A session validates first, resumes, and ends early without losing progress; its batches."""

import os
import signal
from pathlib import Path
from shutil import copytree

import pytest
import torch

from nope_probe import UserError
from nope_probe.run.processes import Interrupted, checkpoint_dir, locked
from nope_probe.run.session import Session
from nope_probe.run.settings import RunSettings
from nope_probe.studies.ablate import Settings
from nope_probe.studies.ablate_run import Ablate

SMALL = {"remove": ("none",), "model": "nope-tiny", "layers": 1}
SMALL |= {"n_seqs": 13, "seq_len": 17, "folds": 4}
MAPS = {"folds": torch.zeros(4, 1, 17, 17).double()}


def not_reached(*_: object) -> None:
    raise AssertionError("a model was loaded")


def run_out_of_memory(settings: Settings) -> None:
    with Session(settings).opened() as session:
        session.checkpoint.save("score/intact", MAPS)
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_running_out_of_memory_is_a_users_error_and_keeps_progress(tmp_path: Path):
    with pytest.raises(UserError, match="a single sequence, or the model, does not fit into"):
        run_out_of_memory(Settings(**SMALL, out=tmp_path / "run"))
    assert (checkpoint_dir(tmp_path / "run") / "score,intact.safetensors").is_file()
    assert not (tmp_path / "run").exists()


def test_the_sequences_of_a_run_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = Settings(**SMALL, out=tmp_path / "run")
    with Session(settings).opened() as first:
        made = first.sequences()
    monkeypatch.setattr("nope_probe.run.session.make_sequences", None)
    with Session(settings).opened() as second:
        read = second.sequences()
    assert torch.equal(read.inputs, made.inputs)
    assert (read.name, read.bos) == (made.name, made.bos) == ("shipped", True)


def test_a_second_process_is_refused_before_it_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nope_probe.run.session.load_model", not_reached)
    settings = Settings(**SMALL, out=tmp_path / "run")
    with (
        locked(checkpoint_dir(settings.out)),
        pytest.raises(UserError, match="another process is at work on the run in"),
    ):
        Ablate.run(settings)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be copied: the place of a run does not belong to its identity."""
    return Ablate.run(Settings(**SMALL, out=tmp_path_factory.mktemp("finished") / "run"))


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_run_that_was_finished_before_or_meanwhile_is_shown_without_a_model(
    meanwhile: bool,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    settings = Settings(**SMALL, out=tmp_path / "run")

    def finish(settings: Settings) -> None:
        assert meanwhile
        copytree(finished, settings.out)

    if not meanwhile:
        copytree(finished, settings.out)
        checkpoint_dir(settings.out).mkdir()
        (checkpoint_dir(settings.out) / "about.json").touch()
    monkeypatch.setattr("nope_probe.run.session.load_model", not_reached)
    # Between the two looks at the folder, before it is locked.
    monkeypatch.setattr("nope_probe.run.session.validate_reach", finish)
    assert Ablate.run(settings) == settings.out
    shown = capsys.readouterr().err
    assert shown.startswith("finished before, in ")
    assert shown.endswith(f"s: shown again from {settings.out}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_interrupted_run_that_nobody_keeps_says_how_to_keep_it(tmp_path: Path):
    settings = Settings(**SMALL, out=tmp_path / "run")
    with (
        pytest.raises(Interrupted, match="nothing was kept; a run with out=FOLDER goes on"),
        Session(settings, is_kept=False).opened(),
    ):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("seq_len", "n_seqs"), [(64, 32), (256, 32), (257, 31), (1024, 8), (8192, 1), (30_000, 1)]
)
def test_an_automatic_batch_holds_at_most_32_sequences_and_8192_tokens(seq_len, n_seqs):
    assert RunSettings(seq_len=seq_len).seqs_per_batch == n_seqs


def test_naming_the_automatic_batch_size_is_the_same_run():
    assert RunSettings(batch_size=32).recorded() == RunSettings().recorded()
