"""Places that can be written to, room, and one process at a time on a folder."""

import os
import signal
import time
from pathlib import Path

import pytest

from nope_probe import UserError
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.processes import free_memory, locked, output_folder, validate_memory


def lock_and_wait(folder: Path) -> int:
    """Fork a process that locks a folder, keeps something in it and waits."""
    if pid := os.fork():
        while not (folder / "kept").exists():
            time.sleep(0.001)
        return pid
    with locked(folder):
        (folder / "kept").touch()
        time.sleep(60)
    os._exit(0)


def test_a_folder_is_locked_until_its_process_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / ".run.unfinished"
    pid = lock_and_wait(folder)
    with (
        pytest.raises(UserError, match=f"another process is at work on the run in {folder}"),
        locked(folder),
    ):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with locked(folder):  # what is gone does not block
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["kept", "lock"]


def test_the_folder_of_a_run_is_where_its_name_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    for name, place in (("../link", "here"), (".", "here"), ("x/..", "here"), ("../new", "new")):
        assert output_folder(Path(name)).resolve() == tmp_path / place
        assert output_folder(Path(name)).name == place


def test_what_was_made_for_nothing_is_removed_and_what_was_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "deep" / "run"
    with locked(folder):
        (folder / "kept").mkdir()
        (folder / "kept" / "file").touch()
        RunCheckpoint(folder).discard()
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    with locked(folder):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_free_memory_is_the_machines_or_what_the_container_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("nope_probe.run.processes._CONTAINER_LIMIT", limit)
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text in (None, "max\n"):  # no container, or one without a limit
        if text is not None:
            limit.write_text(text)
        assert 7001 < free_memory() < of_machine
    limit.write_text("7001\n")
    validate_memory(7001, "--seq-len")
    with pytest.raises(
        UserError, match=r"at least 7\.0 kB of memory, and 7\.0 kB are free; lower -"
    ):
        validate_memory(7002, "--seq-len")
