"""Testing where a run can be written leaves nothing there, or nothing that the next test leaves."""

import os
import signal
from pathlib import Path

import pytest

from nope_probe.errors import UserError
from nope_probe.runtime.places import validate_folder_place


def killed_at(function: str, place: Path) -> int:
    """Test a place in a process that is killed before a change on disk; return how that ended."""
    pid = os.fork()
    if not pid:
        setattr(os, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        validate_folder_place(place)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("name", ["run", "new/run", "a[b]*"])
def test_what_a_killed_test_leaves_the_next_one_removes(name: str, tmp_path: Path) -> None:
    assert killed_at("rmdir", tmp_path / name) == -signal.SIGKILL
    assert len([*tmp_path.rglob(".*.unfinished.*")]) == 1
    validate_folder_place(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_place_is_free_though_another_process_removes_the_tested_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir = os.rmdir

    def removed_twice(*arguments: object, **options: object) -> None:
        rmdir(*arguments, **options)
        rmdir(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", removed_twice)
    validate_folder_place(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_is_no_leftover_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / ".run.unfinished.writable").mkdir()
    (tmp_path / ".run.unfinished.writable" / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*run: Directory not empty"):
        validate_folder_place(tmp_path / "run")
    assert [path.name for path in tmp_path.rglob("*")] == [".run.unfinished.writable", "file"]
