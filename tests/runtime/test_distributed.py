"""A run's maps do not depend on how many processes share it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from support.command_line import refused
from support.forks import forks

from nope_probe import circuit, reproduce, scores, simulate
from nope_probe.errors import UserError
from nope_probe.hooks.streaming import batches_of
from nope_probe.models.names import CHECKPOINTS
from nope_probe.runtime.distributed import own_device

SMALL = ["--model", "nope-tiny", "--layers", "2", "--n-seqs", "61", "--seq-len", "19"]
SCORES = ["scores", *SMALL, "--per-head", "--batch-size", "7"]
BEHAVIOUR = ["behaviour", "--model", "nope-tiny", "--n-seqs", "23", "--seq-len", "29"]
BEHAVIOUR += ["--measures", "loss", "position", "pattern", "--remove", "mask", "--batch-size", "5"]
ABLATE = ["ablate", *SMALL, "--batch-size", "5", "--players", "mask", "w_q"]


@pytest.mark.parametrize("command", [SCORES, ABLATE], ids=["scores", "ablate"])
def test_one_two_and_three_processes_give_the_same_maps(command: list[str], tmp_path: Path):
    codes, stderr = forks("share", "1,2,3", tmp_path, command)
    assert codes == {"1": [0], "2": [0, 0], "3": [0, 0, 0]}, stderr
    runs = {count: load_file(tmp_path / count / "maps.safetensors") for count in codes}
    for count in ("2", "3"):
        assert runs[count].keys() == runs["1"].keys()
        for name, alone in runs["1"].items():
            error = np.nanmax(np.abs(runs[count][name] - alone))
            assert error <= 1e-6 * np.nanmax(np.abs(alone))
    assert not list(tmp_path.glob(".*"))


def test_processes_that_share_a_behaviour_run_write_the_same_numbers(tmp_path: Path):
    codes, _ = forks("share", "1,2", tmp_path, BEHAVIOUR)
    assert codes == {"1": [0], "2": [0, 0]}
    for name in ("behaviour", "decodability", "bridge"):
        alone, shared = (
            pd.read_csv(tmp_path / count / f"{name}.csv").select_dtypes("number") for count in "12"
        )
        np.testing.assert_allclose(shared, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_processes", [1, 2, 3, 5])
def test_every_sequence_is_in_one_share(n_processes: int):
    dealt = [batches_of(37, 7, rank, n_processes) for rank in range(n_processes)]
    seqs = [s for share in dealt for start, stop in share for s in range(start, stop)]
    assert sorted(seqs) == list(range(37))
    assert {start % 7 for share in dealt for start, _ in share} == {0}


def test_a_process_without_a_batch_is_an_error():
    with pytest.raises(ValueError, match="3 processes, but 14 sequences in batches of 7"):
        batches_of(14, 7, 2, 3)


@pytest.mark.parametrize(
    ("command", "arguments"), [(circuit, []), (simulate, []), (reproduce, ["figure3"])]
)
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
        "only ablate, behaviour, scores and the figures of language models run in several processes"
    )


@pytest.mark.parametrize(("missing", "lacks"), [("data", [2]), ("model", [0, 1, 2])])
def test_what_some_processes_lack_ends_all_in_one_line_that_says_which(
    missing: str, lacks: list[int], tmp_path: Path
):
    text = "in the other one there is more than that " * 20
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        if rank not in lacks or missing != "data":
            rows = f"{json.dumps({'text': text})}\n" * 64
            (tmp_path / str(rank) / "texts.jsonl").write_text(rows)
        if rank not in lacks or missing != "model":
            copytree(CHECKPOINTS["nope-tiny"], tmp_path / str(rank) / "own")
    small = ["--model", "own", "--layers", "1", "--n-seqs", "61", "--seq-len", "19"]
    command = ["scores", *small, "--batch-size", "7", "--data", "texts.jsonl"]
    codes, stderr = forks("apart", "3", tmp_path, command)
    assert codes == [2, 2, 2], stderr
    (line,) = [line for line in stderr.splitlines() if line]
    who = "" if 0 in lacks else f"process {lacks[0]}: "
    what = "no data 'texts.jsonl': " if missing == "data" else "unknown model 'own'; "
    assert line.startswith(f"error: {who}{what}")
    assert not list(tmp_path.glob(".*"))


def test_a_process_that_cannot_load_the_model_ends_all_in_one_line(tmp_path: Path):
    for rank in range(2):
        copytree(CHECKPOINTS["nope-tiny"], tmp_path / str(rank) / "own")
    (tmp_path / "1" / "own" / "model.safetensors").write_bytes(b"")
    small = ["--model", "own", "--layers", "1", "--n-seqs", "61", "--seq-len", "19"]
    codes, stderr = forks("apart", "2", tmp_path, ["scores", *small, "--batch-size", "7"])
    assert codes == [2, 2], stderr
    (line,) = [line for line in stderr.splitlines() if line]
    assert line.startswith("error: process 1: ")
    assert "model.safetensors is a broken safetensors file" in line
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("rank", "server"), [(0, "nobody"), (1, "nobody"), (1, "mute")])
def test_a_process_without_the_others_ends_in_one_line(
    rank: int,
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("nope_probe.runtime.meeting._GRACE", 1)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        port = mute.getsockname()[1]
        if server == "mute":
            mute.listen()
        variables = {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (variables | {"NOPE_PROBE_JOIN_SECONDS": 1}).items():
            monkeypatch.setenv(name, str(value))
        line = refused(capfd, tmp_path, scores, *SMALL, "--batch-size", 7, code=1)
    assert line.startswith(f"2 processes did not meet at 127.0.0.1:{port} within 1 s (")
    assert line.endswith(
        ": start all of them with torchrun, unset WORLD_SIZE, or set NOPE_PROBE_JOIN_SECONDS"
    )


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


def test_each_process_of_a_node_takes_its_own_gpu_if_it_is_there(monkeypatch: pytest.MonkeyPatch):
    assert own_device("auto") == own_device("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("auto") == "cpu"
    with pytest.raises(UserError, match="no device 'cuda:3' on this machine"):
        own_device("cuda")


def test_more_processes_than_batches_are_refused_in_one_line(tmp_path: Path):
    ended = torchrun("--batch-size", "61", "--out", str(tmp_path / "run"))
    assert ended.returncode != 0
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    message = "error: 61 sequences in batches of 61 are 1 batches, too few for 2 processes; "
    assert errors == [message + "lower --batch-size"]
    assert not list(tmp_path.iterdir())
