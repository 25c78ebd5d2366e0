"""A checkpoint holds the finished parts of a run, for the same run alone."""

import signal
from pathlib import Path

import pytest
import torch

from nope_probe.errors import StorageError, UserError
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.runtime.checkpoint import RunCheckpoint
from nope_probe.runtime.processes import Signals

MAPS = {"folds": torch.arange(66.0).double().view(2, 3, 11), "counts": torch.tensor([5, 7])}


def checkpoint(out: Path, **about: object) -> RunCheckpoint:
    return RunCheckpoint(out / ".run.unfinished", about=about)


def test_the_next_process_finds_the_finished_parts(tmp_path: Path):
    with checkpoint(tmp_path) as first:
        assert "score/mask" not in first
        first.save("score/mask", MAPS)
        first.save("inputs", {"tokens": torch.arange(13)}, {"name": "text", "bos": "True"})
        assert "score/mask" in first
    with checkpoint(tmp_path) as second:
        assert "score/mask" in second
        assert "score/rope" not in second
        maps = second.load("score/mask")
        assert maps.keys() == MAPS.keys()
        assert all(torch.equal(maps[name], MAPS[name]) for name in MAPS)
        assert second.notes("inputs") == {"name": "text", "bos": "True"}


def test_a_checkpoint_without_a_folder_holds_finished_parts_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunCheckpoint() as nowhere:
        nowhere.save("score", MAPS, {"a": "b"})
        assert nowhere.load("score")["folds"] is MAPS["folds"]
        assert nowhere.notes("score") == {"a": "b"}
        with nowhere.stream("next") as stream:
            stream.save(MAPS)
            assert stream.restore() == {}
    assert not list(tmp_path.iterdir())


def test_a_part_is_computed_once_however_often_the_run_is_resumed(tmp_path: Path):
    computed = []

    def compute(stream: StreamCheckpoint) -> dict[str, torch.Tensor]:
        computed.append(stream)
        return {"sums": torch.arange(7.0)}

    for _ in range(3):
        with RunCheckpoint(tmp_path / "run") as checkpoint:
            found = checkpoint.once("part", compute)["sums"]
        assert torch.equal(found, torch.arange(7.0))
    assert len(computed) == 1


def test_the_state_of_a_stream_is_restored_by_the_same_stream_alone(tmp_path: Path):
    with checkpoint(tmp_path) as first, first.stream("score/mask") as stream:
        assert stream.restore() == {}
        stream.save(MAPS)
    with checkpoint(tmp_path) as second:
        with second.stream("score/rope") as other:
            assert other.restore() == {}
        with second.stream("score/mask") as same:
            assert torch.equal(same.restore()["folds"], MAPS["folds"])
        second.save("score/mask", MAPS)
        with second.stream("score/mask") as again:
            assert again.restore() == {}


def test_a_stream_is_saved_every_so_many_batches_and_on_a_signal(tmp_path: Path):
    signals = Signals()
    with RunCheckpoint(signals=signals, every=3) as run, run.stream("score") as stream:
        assert [stream.is_due() for _ in range(7)] == [
            False,
            False,
            True,
            False,
            False,
            True,
            False,
        ]
        signals.received = signal.SIGINT
        assert stream.is_due()
        signals.received = None


@pytest.mark.parametrize(
    ("about", "what"),
    [({"settings": 1, "weights": "w"}, "settings"), ({"weights": "x"}, "weights")],
)
def test_an_unfinished_run_of_something_else_is_not_resumed(about: dict, what: str, tmp_path: Path):
    with checkpoint(tmp_path, settings=0, weights="w"):
        pass
    with (
        pytest.raises(UserError, match=f"unfinished run with other {what}; remove it, or choose"),
        checkpoint(tmp_path, **about),
    ):
        pass
    assert (tmp_path / ".run.unfinished" / "about.json").is_file()
    with checkpoint(tmp_path, settings=0, weights="w"):
        pass


def test_one_flipped_bit_of_a_kept_file_is_noticed(tmp_path: Path):
    with checkpoint(tmp_path) as first, first.stream("score/rope") as stream:
        first.save("score/mask", MAPS, {"name": "text"})
        stream.save(MAPS)
    for name in ("score,mask.safetensors", "state-0.partial"):
        file = tmp_path / ".run.unfinished" / name
        content = file.read_bytes()
        for place in range(8, len(content), 13):
            file.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
            with (
                checkpoint(tmp_path) as second,
                second.stream("score/rope") as stream,
                pytest.raises(StorageError, match=f"{file} is broken"),
            ):
                stream.restore() if name.startswith("state") else second.load("score/mask")
        file.write_bytes(content)
    with checkpoint(tmp_path) as last, last.stream("score/rope") as stream:
        assert last.notes("score/mask") == {"name": "text"}
        assert stream.restore().keys() == MAPS.keys()


def test_two_swapped_files_are_noticed(tmp_path: Path):
    with checkpoint(tmp_path) as first:
        first.save("score/mask", MAPS)
        first.save("score/rope", {name: -each for name, each in MAPS.items()})
    folder = tmp_path / ".run.unfinished"
    mask, rope = folder / "score,mask.safetensors", folder / "score,rope.safetensors"
    mask.rename(folder / "between")
    rope.rename(mask)
    (folder / "between").rename(rope)
    with checkpoint(tmp_path) as second:
        for key in ("score/mask", "score/rope"):
            with pytest.raises(StorageError, match="it is not what was written there"):
                second.load(key)


def test_another_runs_file_is_noticed(tmp_path: Path):
    for name in ("one", "two"):
        with checkpoint(tmp_path / name, settings=name) as run:
            run.save("score", MAPS)
    one, two = (
        tmp_path / name / ".run.unfinished" / "score.safetensors" for name in ("one", "two")
    )
    two.write_bytes(one.read_bytes())
    with checkpoint(tmp_path / "two", settings="two") as run, pytest.raises(StorageError):
        run.load("score")


def fail(out: Path, error: Exception) -> None:
    """Save a map, and end in an error."""
    with checkpoint(out) as ours:
        ours.save("score", MAPS)
        raise error


def test_a_users_mistake_leaves_nothing(tmp_path: Path):
    with pytest.raises(UserError, match="no such thing"):
        fail(tmp_path / "runs" / "deep", UserError("no such thing"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [StorageError("no space left"), RuntimeError("a bug")])
def test_another_failure_keeps_what_was_saved_before(error: Exception, tmp_path: Path):
    with pytest.raises(type(error)):
        fail(tmp_path, error)
    assert (tmp_path / ".run.unfinished" / "score.safetensors").is_file()


def test_a_failure_before_anything_was_computed_leaves_nothing(tmp_path: Path):
    def fail_early() -> None:
        with checkpoint(tmp_path / "runs" / "deep") as ours:
            ours.save("inputs", MAPS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_early()
    assert not list(tmp_path.iterdir())
