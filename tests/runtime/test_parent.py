"""A process that torchrun started ends soon after a torchrun that was killed."""

import os
import signal
import time

import pytest

from nope_probe.runtime import parent
from nope_probe.runtime.signals import Interrupted, Signals


def worker(write: int, grace: float) -> None:
    """Wait for the end of the process that started this one, and say how this one ended."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    parent.EVERY, parent.GRACE = 0.01, grace
    parent.end_with_torchrun()
    if grace:
        try:
            with Signals():
                os.write(write, b"ready ")
                time.sleep(60)
        except Interrupted as stop:
            os.write(write, b"interrupted by %d" % stop.signum)
    else:  # as one that waits for another process, and never comes to see the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.write(write, b"ready ")
        time.sleep(60)
        os.write(write, b"not reached")


@pytest.mark.parametrize(
    ("grace", "said"), [(60.0, b"interrupted by 15"), (0.0, b"")], ids=["computing", "waiting"]
)
def test_a_process_ends_after_the_torchrun_that_was_killed(grace: float, said: bytes):
    read, write = os.pipe()
    agent = os.fork()
    if not agent:
        if not os.fork():
            try:
                worker(write, grace)
            finally:
                os._exit(0)
        os.close(write)
        time.sleep(60)
        os._exit(0)
    os.close(write)
    assert os.read(read, 6) == b"ready "
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    found = b""
    while part := os.read(read, 100):  # until the process has ended
        found += part
    os.close(read)
    assert found == said


def test_a_process_of_its_own_watches_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(parent.threading, "Thread", None)
    parent.end_with_torchrun()
