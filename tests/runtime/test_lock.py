"""One process at a time works on a folder, and a process that is gone blocks nobody."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from nope_probe.errors import UserError
from nope_probe.runtime.places import FolderLock, LockedError


def lock_and_wait(folder: Path) -> int:
    """Fork a process that locks a folder, keeps something in it and waits."""
    if pid := os.fork():
        while not (folder / "kept").exists():
            time.sleep(0.001)
        return pid
    with FolderLock(folder):
        (folder / "kept").touch()
        time.sleep(60)
    os._exit(0)


def test_a_held_folder_names_the_process_until_it_is_killed(tmp_path: Path):
    folder = tmp_path / ".run.unfinished"
    pid = lock_and_wait(folder)
    with pytest.raises(LockedError, match=f"process {pid} is at work on the run in {folder}"):
        FolderLock(folder).__enter__()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert json.loads((folder / "process.json").read_text())["pid"] == pid
    with FolderLock(folder):
        assert json.loads((folder / "process.json").read_text())["pid"] == os.getpid()
    assert sorted(path.name for path in folder.iterdir()) == ["kept", "lock"]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ('{"pid": 17, "host": "another"}', "process 17 on another is at work"),
        ("[" * 100_000, "another process is at work"),
    ],
)
def test_a_broken_record_or_another_host_ends_in_one_line(record: str, named: str, tmp_path: Path):
    with FolderLock(tmp_path / "run"):
        (tmp_path / "run" / "process.json").write_text(record)
        with pytest.raises(LockedError, match=named):
            FolderLock(tmp_path / "run").__enter__()


def test_the_record_of_a_process_that_is_gone_does_not_block(tmp_path: Path):
    (tmp_path / "lock").touch()
    (tmp_path / "process.json").write_text('{"pid": 1, "host": "another"}')
    with FolderLock(tmp_path):
        pass


def test_what_was_made_for_nothing_is_removed(tmp_path: Path):
    with FolderLock(tmp_path / "runs" / "deep" / "run") as lock:
        (lock.folder / "kept").mkdir()
        (lock.folder / "kept" / "file").touch()
        assert not lock.is_empty()
        lock.clear()
        assert lock.is_empty()
    assert not list(tmp_path.iterdir())


def test_what_was_there_before_stays(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    with FolderLock(tmp_path / "runs" / "run"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_lock_may_be_taken_twice_by_its_holder(tmp_path: Path):
    with FolderLock(tmp_path / "run") as lock:
        with lock:
            pass
        with pytest.raises(LockedError):
            FolderLock(tmp_path / "run").__enter__()
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file/run: Not a directory"):
        FolderLock(tmp_path / "file" / "run").__enter__()
