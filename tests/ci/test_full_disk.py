"""A full disk ends a run in one line and costs nothing that was computed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ci.failures import files_of_at_most
from support.command_line import run_command

from nope_probe import ablate

SMALL = ["--model", "nope-tiny", "--layers", "2", "--n-seqs", "23", "--seq-len", "17"]
SMALL += ["--batch-size", "3", "--folds", "5"]


def files(folder: Path) -> dict[str, bytes]:
    kept = [*folder.glob("*.safetensors"), *folder.glob("*.csv")]
    return {path.name: path.read_bytes() for path in kept}


@contextmanager
def full_from_write(number: int) -> Iterator[list[int]]:
    """Let the writes of whole files fail from one on, counted from 1."""
    count, write = [0], os.fsync

    def fsync(file: int) -> None:
        count[0] += 1
        if count[0] >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield count


def fails_in_one_line(out: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Run the command, which fails, and return the line in which it says why."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_command(ablate, "--remove", "none", *SMALL, "--out", out)
    assert stop.value.code == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert not out.exists()
    assert not [*out.parent.glob(".*.unfinished/.*"), *out.parent.glob(".*.unfinished/run")]
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    return line


def test_whichever_write_fails_a_rerun_with_room_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with full_from_write(1000) as count:
        run_command(ablate, "--remove", "none", *SMALL, "--out", tmp_path / "undisturbed")
    assert count[0] >= 3
    for number in (1, 3):
        with full_from_write(number):
            line = fails_in_one_line(tmp_path / "run", capfd)
        assert "No space left on device" in line
    left = {path.name for path in tmp_path.glob(".run.unfinished/*")}
    assert "inputs.safetensors" in left
    run_command(ablate, "--remove", "none", *SMALL, "--out", tmp_path / "run")
    assert files(tmp_path / "run") == files(tmp_path / "undisturbed")
    assert not [*tmp_path.glob(".*")]


def test_a_disk_that_is_full_at_the_final_write_costs_no_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with files_of_at_most(2_000_000):  # the page is longer
        line = fails_in_one_line(tmp_path / "run", capfd)
    assert line == f"error: cannot write the run to {tmp_path / 'run'}: File too large"
    monkeypatch.setattr("nope_probe.run.checkpoint.RunCheckpoint.stream", not_computed_again)
    run_command(ablate, "--remove", "none", *SMALL, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "manifest.json").is_file()
    assert not [*tmp_path.glob(".*")]


def not_computed_again(*_: object, **__: object) -> None:
    raise AssertionError("computed again")
