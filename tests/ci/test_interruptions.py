"""A signal ends every command with its own exit code and in one line."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from support.command_line import run_command

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
