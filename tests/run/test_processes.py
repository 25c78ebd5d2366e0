"""How processes share a machine and a run, and how failures and signals end it."""

import os
import signal
import socket
import time
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
from nope_probe.run.processes import (
    Interrupted,
    Signals,
    free_memory,
    locked,
    output_folder,
    validate_memory,
)

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
