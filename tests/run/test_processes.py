"""How processes share a run, and how failures and signals end it."""

import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support.command_line import refused
from support.forks import forks
from support.rounding import NETWORK, assert_same_table

from nope_probe import circuit, reproduce, scores
from nope_probe.errors import UserError
from nope_probe.hooks.reading.streaming import batches_of
from nope_probe.run import process_group
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.process_group import device_of_process
from nope_probe.run.processes import Interrupted, Signals

SMALL = ["--model", "nope-tiny", "--layers", "2", "--n-seqs", "61", "--seq-len", "19"]
SCORES = ["scores", *SMALL, "--per-head", "--batch-size", "7"]
BEHAVIOUR = ["behaviour", "--model", "nope-tiny", "--n-seqs", "23", "--seq-len", "29"]
BEHAVIOUR += ["--measures", "loss", "position", "--remove", "mask", "--batch-size", "5"]
EVERY = pytest.mark.every_combination
ABLATE = ["ablate", *SMALL, "--batch-size", "5", "--remove", "w_q"]


@pytest.mark.parametrize(
    "command", [SCORES, pytest.param(ABLATE, marks=EVERY)], ids=["scores", "ablate"]
)
def test_one_and_three_processes_give_the_same_maps(command: list[str], tmp_path: Path):
    codes, stderr = forks("share", "1,3", tmp_path, command)
    assert codes == {"1": [0], "3": [0, 0, 0]}, stderr
    one, three = (load_file(tmp_path / count / "maps.safetensors") for count in codes)
    assert three.keys() == one.keys()
    for name, alone in one.items():
        assert np.nanmax(np.abs(three[name] - alone)) <= NETWORK * np.nanmax(np.abs(alone))
    assert not list(tmp_path.glob(".*"))


@EVERY
def test_processes_that_share_a_behaviour_run_write_the_same_numbers(tmp_path: Path):
    codes, stderr = forks("share", "1,2", tmp_path, BEHAVIOUR)
    assert codes == {"1": [0], "2": [0, 0]}, stderr
    for name in ("behaviour", "decodability"):
        alone, shared = (
            pd.read_csv(tmp_path / count / f"{name}.csv").select_dtypes("number") for count in "12"
        )
        assert_same_table(shared, alone)


@pytest.mark.parametrize("n_processes", [2, 5])
def test_every_sequence_is_in_one_share(n_processes: int):
    dealt = [batches_of(37, 7, rank, n_processes) for rank in range(n_processes)]
    seqs = [s for share in dealt for start, stop in share for s in range(start, stop)]
    assert sorted(seqs) == list(range(37))
    assert {start % 7 for share in dealt for start, _ in share} == {0}


def test_a_process_without_a_batch_is_an_error():
    with pytest.raises(ValueError, match="3 processes, but 14 sequences in batches of 7"):
        batches_of(14, 7, 2, 3)


@pytest.mark.parametrize(("command", "arguments"), [(circuit, []), (reproduce, ["figure3"])])
def test_a_command_for_one_process_is_refused_to_several(
    command: Any,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    torchrun = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    line = refused(capfd, tmp_path, command, *arguments)
    assert line == (
        "only ablate, attention, behaviour, scores, trace and the figures of language models "
        "run in several processes"
    )


def test_the_variables_of_torchrun_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused(capfd, tmp_path, scores, *SMALL, code=1)
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
        line = refused(capfd, tmp_path, scores, *SMALL, "--batch-size", 7, code=1)
    assert line.startswith("2 processes did not connect within 1 s (")


@pytest.mark.parametrize(
    ("failures", "codes", "line"),
    [
        ("2 1:mistake", [1, 2], "error: another process of this run has ended"),
        ("2 0:SIGTERM 1:SIGTERM", [143, 143], "interrupted: progress was saved; "),
    ],
)
def test_where_one_process_fails_all_end_in_one_line_and_progress_is_saved(
    failures: str, codes: list[int], line: str, tmp_path: Path
):
    found, stderr = forks("fail", failures, tmp_path, SCORES)
    assert found == codes, stderr
    lines = [text for text in stderr.splitlines() if text and "%|" not in text]
    assert lines[0].startswith("running 1 pass;")
    assert len(lines) == 2
    assert lines[1].startswith(line)
    assert list(tmp_path.glob(".*.unfinished/inputs.safetensors"))


@pytest.mark.parametrize(
    "command", [SCORES, pytest.param(ABLATE, marks=EVERY)], ids=["scores", "ablate"]
)
def test_where_one_process_is_killed_the_other_ends_and_the_run_resumes_to_the_same_bytes(
    command: list[str], tmp_path: Path
):
    codes, stderr = forks("fail", "2 0:slow 1:SIGKILL", tmp_path, command)
    assert codes == [1, -9], stderr
    assert_resumes_to_the_same_bytes(command, tmp_path)


def assert_resumes_to_the_same_bytes(command: list[str], out: Path) -> None:
    (out / "undisturbed").mkdir()
    for folder in (out, out / "undisturbed"):
        codes, stderr = forks("share", "2", folder, command)
        assert codes == {"2": [0, 0]}, stderr
    for name in ("maps.safetensors", "pattern.csv", "tokens.safetensors"):
        if (out / "undisturbed" / "2" / name).exists():
            resumed, undisturbed = (each / "2" / name for each in (out, out / "undisturbed"))
            assert resumed.read_bytes() == undisturbed.read_bytes()


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "nope_probe.scores", *SMALL, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_processes_of_torchrun_write_and_print_once(tmp_path: Path):
    ended = torchrun("--batch-size", "7", "--out", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("report.html") == 1
    assert (tmp_path / "run" / "manifest.json").is_file()


def test_a_mistake_is_one_line_of_ours_and_torchrun_prints_the_first_error(tmp_path: Path):
    ended = torchrun("--batch-size", "61", "--out", str(tmp_path / "run"))
    assert ended.returncode != 0
    message = "61 sequences in batches of 61 are 1 batches, too few for 2 processes; "
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {message}lower --batch-size"]
    first = ended.stderr.partition("Root Cause")[2]
    assert f"UserError: {message}" in first
    assert "run/settings.py" not in first  # a mistake has no traceback
    assert not list(tmp_path.iterdir())


def test_each_process_of_a_node_takes_its_own_gpu_if_it_is_there(monkeypatch: pytest.MonkeyPatch):
    assert device_of_process("auto") == device_of_process("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of_process("auto") == "cpu"
    with pytest.raises(UserError, match="no device 'cuda:3' on this machine"):
        device_of_process("cuda")


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
    assert (tmp_path / "run" / "state-0-of-1-score.partial").is_file()


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
