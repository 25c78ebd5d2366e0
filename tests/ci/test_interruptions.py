"""A signal or a full disk ends a command in one line, and costs nothing that was computed."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from ci.failures import files_of_at_most
from support.command_line import run_command

from nope_probe import ablate
from nope_probe.cli import one_line_errors
from nope_probe.run.processes import Interrupted, Signals
from nope_probe.studies.commands import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_command_in_one_line_and_leaves_nothing(
    name: str,
    signum: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    def get_signal(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signum)
        raise AssertionError("not reached")

    for entered in ("run.session.record_sources", "studies.compare.read_manifest"):
        monkeypatch.setattr(f"nope_probe.{entered}", get_signal)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=str(code)):
        run_command(import_module(f"nope_probe.{name}"), *["a", "b"] * (name == "compare"))
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line in ("interrupted", "interrupted: nothing was written")
    assert not list(tmp_path.rglob("*"))


def test_the_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with one_line_errors():
        assert all(signal.getsignal(number) is not handler for number, handler in before.items())
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_between_streams_raises_at_once(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="nothing was written") as received, Signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert received.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def receive_two_signals(capfd: pytest.CaptureFixture[str]) -> None:
    with Signals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        assert "stopping after this batch; press Ctrl-C again to stop now" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")


def receive_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with Signals() as signals:
        with signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == signal.SIGTERM
        raise AssertionError("not reached")


@pytest.mark.parametrize("receive", [receive_two_signals, receive_at_the_end])
def test_a_second_signal_does_not_wait_and_one_raises_at_the_end_of_the_stream(
    receive: Callable[..., None], capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(Interrupted) as received:
        receive(capfd)
    assert received.value.__cause__ is None  # nothing came after the signal
    assert capfd.readouterr().err == ""


WAITS = """
from nope_probe.run.process_group import connect
from nope_probe.cli import one_line_errors
with one_line_errors():
    print("waits", flush=True)
    connect()
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits_for_others_and_no_handler_runs_meanwhile(
    rank: int, signum: int
) -> None:
    """torch waits in C++, for minutes: longer than the time that `communicate` is given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    variables = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0", **address}
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITS],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None
    waiting.stdout.readline()
    time.sleep(0.5)  # until it is in C++; before, the handler ends it as well
    waiting.send_signal(signum)
    _, printed = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + signum
    assert printed == "interrupted\n"


def test_what_a_caller_does_on_a_signal_is_left_to_the_caller() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))
    with Signals.end_at_once():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1


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
