"""A signal ends a run at once, or between two batches of a stream."""

import os
import signal
from pathlib import Path

import pytest
import torch

from nope_probe.runtime.checkpoint import RunCheckpoint
from nope_probe.runtime.signals import Interrupted, Signals

MAPS = {"folds": torch.zeros(2, 3, 11).double()}


def test_a_signal_between_streams_raises_at_once(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="nothing was written") as received, Signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert received.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def receive_a_signal_in_a_stream(folder: Path) -> None:
    with (
        Signals() as signals,
        RunCheckpoint(folder, signals=signals) as run,
        run.stream("score") as stream,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stream.is_due()
        stream.save(MAPS)
        stream.advance(5)
        raise AssertionError("not reached")


def test_a_signal_during_a_stream_waits_for_the_end_of_the_batch(tmp_path: Path):
    with pytest.raises(Interrupted, match="run the same command to resume"):
        receive_a_signal_in_a_stream(tmp_path / "run")
    assert (tmp_path / "run" / "state-0.partial").is_file()


def receive_two_signals(capfd: pytest.CaptureFixture[str]) -> None:
    with Signals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        assert "stopping after this batch; press Ctrl-C again to stop now" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")


def test_a_second_signal_does_not_wait(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(Interrupted):
        receive_two_signals(capfd)
    assert capfd.readouterr().err == ""


def test_a_deferred_signal_raises_at_the_end_of_the_stream():
    with pytest.raises(Interrupted), Signals() as signals:
        receive_at_the_end(signals)


def receive_at_the_end(signals: Signals) -> None:
    with signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("not reached")


def test_a_signal_while_processes_wait_for_each_other_raises_at_once():
    with pytest.raises(Interrupted), Signals() as signals:
        receive_while_waiting(signals)


def receive_while_waiting(signals: Signals) -> None:
    with signals.deferred():
        signals.stop_deferring()
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not reached")
