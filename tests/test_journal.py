"""A journal keeps what is finished, and gives it to the same run alone."""

import os
import signal
from pathlib import Path

import pytest
import torch

from nope_probe.data import Windows
from nope_probe.errors import UserError
from nope_probe.hooks.capture import ScoreMaps
from nope_probe.hooks.gain import Gains
from nope_probe.interrupts import Interrupted
from nope_probe.journal import Journal
from nope_probe.results import StorageError

MAPS = ScoreMaps(folds=torch.arange(66.0).double().view(2, 3, 11, 1), counts=torch.tensor([5, 7]))


def journal(out: Path, **settings: object) -> Journal:
    return Journal(out / "run", settings=settings)


def test_what_is_finished_is_read_and_not_computed_again(tmp_path: Path):
    gains = Gains(c={"w_q": (0.1, 1 / 3), "w_k": (2.0, 7.0), "w_o": (1.0,), "w_v": ()})
    windows = Windows(inputs=torch.arange(13)[None], name="text", bos=True)
    with journal(tmp_path) as first:
        first.begin("weights")
        first.maps("score/mask", lambda keeper: MAPS)
        first.gains("gains", lambda keeper: gains)
        first.windows("inputs", lambda: windows)

    def again(*_: object) -> None:
        raise AssertionError("computed again")

    told: list[str] = []
    with journal(tmp_path) as second:
        second.begin("weights")
        second.on_kept = lambda: told.append("kept")
        maps = second.maps("score/mask", again)
        assert torch.equal(maps.folds, MAPS.folds)
        assert torch.equal(maps.counts, MAPS.counts)
        assert maps.mean_route is None
        assert second.gains("gains", again) == gains
        read = second.windows("inputs", again)
    assert told == ["kept", "kept"]  # of windows no bar is shown
    assert torch.equal(read.inputs, windows.inputs)
    assert (read.name, read.bos) == ("text", True)


def test_a_journal_without_a_place_computes_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Journal() as nowhere:
        assert nowhere.maps("score", lambda keeper: MAPS).folds is MAPS.folds
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "weights", "what"), [({"seed": 1}, "w", "settings"), ({"seed": 0}, "x", "weights")]
)
def test_an_unfinished_run_of_something_else_is_not_taken_up(
    settings: dict, weights: str, what: str, tmp_path: Path
):
    with journal(tmp_path, seed=0) as first:
        first.begin("w")
    with (
        pytest.raises(UserError, match=f"unfinished run with other {what}; remove it, or choose"),
        journal(tmp_path, **settings) as second,
    ):
        second.begin(weights)
    assert (tmp_path / ".run.unfinished" / "about.json").is_file()


def test_a_broken_file_is_named(tmp_path: Path):
    with journal(tmp_path) as first:
        first.begin("w")
        first.maps("score", lambda keeper: MAPS)
    file = tmp_path / ".run.unfinished" / "score.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match=f"{file} is broken"):
        fail(tmp_path, RuntimeError("not reached"))


def test_two_processes_are_not_at_work_on_one_run(tmp_path: Path):
    with journal(tmp_path) as first:
        first.begin("w")
        with (
            pytest.raises(UserError, match="another process is at work on the run in"),
            journal(tmp_path) as second,
        ):
            second.begin("w")
        first.maps("score", lambda keeper: MAPS)
    assert (tmp_path / ".run.unfinished" / "score.safetensors").is_file()


def fail(out: Path, error: Exception) -> None:
    """Keep a map, and end in an error."""
    with journal(out) as ours:
        ours.begin("w")
        ours.maps("score", lambda keeper: MAPS)
        raise error


def test_a_users_mistake_leaves_nothing(tmp_path: Path):
    with pytest.raises(UserError, match="no such thing"):
        fail(tmp_path / "runs" / "deep", UserError("no such thing"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [StorageError("no space left"), RuntimeError("a bug")])
def test_another_failure_keeps_what_was_kept_before(error: Exception, tmp_path: Path):
    with pytest.raises(type(error)):
        fail(tmp_path, error)
    assert (tmp_path / ".run.unfinished" / "score.safetensors").is_file()


def test_what_cannot_be_written_is_a_users_error(tmp_path: Path):
    (tmp_path / ".run.unfinished" / ".score.safetensors.partial").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot write .*score\.safetensors"):
        fail(tmp_path, RuntimeError("not reached"))


def test_an_interruption_between_streams_is_heard_at_once(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="nothing was written") as heard, journal(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
