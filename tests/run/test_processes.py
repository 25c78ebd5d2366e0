"""How processes share a run, and how failures and signals end it."""

import os
import signal
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.command_line import refused

from nope_probe import UserError, ablate, circuit, heads
from nope_probe.hooks.reading.streaming import batches_of
from nope_probe.run import process_group
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.process_group import device_of_process
from nope_probe.run.processes import Interrupted, Signals

SMALL = ["--model", "nope-tiny", "--layers", "2", "--n-seqs", "61", "--seq-len", "19"]


@pytest.mark.parametrize("n_processes", [2, 5])
def test_every_sequence_is_in_one_share(n_processes: int):
    dealt = [batches_of(37, 7, rank, n_processes) for rank in range(n_processes)]
    seqs = [s for share in dealt for start, stop in share for s in range(start, stop)]
    assert sorted(seqs) == list(range(37))
    assert {start % 7 for share in dealt for start, _ in share} == {0}


def test_a_process_without_a_batch_is_an_error():
    with pytest.raises(ValueError, match="3 processes, but 14 sequences in batches of 7"):
        batches_of(14, 7, 2, 3)


def test_a_command_for_one_process_is_refused_to_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    torchrun = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    for command in (circuit, heads):
        line = refused(capfd, tmp_path, command)
        assert line == "only ablate, attention, behaviour and trace run in several processes"
    line = refused(capfd, tmp_path, ablate, "--device-map", "auto")
    assert line == "--device-map gives one process all GPUs, and torchrun one each: take one"


def test_the_variables_of_torchrun_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused(capfd, tmp_path, ablate, *SMALL, code=1)
    assert line.startswith("2 processes did not connect")
    assert line.endswith("start all of them with torchrun, or unset WORLD_SIZE")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_without_the_others_ends_in_one_line(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        variables = {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(process_group, "JOIN_TIMEOUT", timedelta(seconds=1))
        line = refused(capfd, tmp_path, ablate, *SMALL, "--batch-size", 7, code=1)
    assert line.startswith("2 processes did not connect within 1 s (")


def test_each_process_of_a_node_takes_its_own_gpu_if_it_is_there(monkeypatch: pytest.MonkeyPatch):
    assert device_of_process("auto") == device_of_process("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of_process("auto") == "cpu"
    with pytest.raises(UserError, match="no device 'cuda:3' on this machine"):
        device_of_process("cuda")


MAPS = {"folds": torch.zeros(2, 3, 11).double()}


def receive_a_signal_in_a_stream(folder: Path) -> None:
    with (
        Signals() as signals,
        RunCheckpoint(folder, signals=signals) as run,
        run.stream("score") as stream,
    ):
        run.save("inputs", MAPS)
        os.kill(os.getpid(), signal.SIGTERM)
        stream.advance(5)
        raise AssertionError("not reached")


def test_a_signal_during_a_stream_waits_for_the_end_of_the_batch(tmp_path: Path):
    with pytest.raises(Interrupted, match="run the same command to resume"):
        receive_a_signal_in_a_stream(tmp_path / "run")
    assert (tmp_path / "run" / "inputs.safetensors").is_file()
