"""Processes that train together start together and end together."""

import json
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from support.command_line import refused
from support.forks import forks

from nope_probe import train

NOPE = ["train", "--preset", "nope-tiny"]


def test_a_process_without_the_others_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("nope_probe.runtime.processes.JOIN_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr("nope_probe.training.corpus.corpus_of", None)  # not reached
    line = refused(capfd, tmp_path, train, *NOPE[1:], "--out", "run", code=1)
    assert line.startswith("2 processes did not meet within 1 s (")


def test_two_processes_train_one_model(tmp_path: Path):
    codes, stderr = forks("share", "2", tmp_path, NOPE)
    assert codes == {"2": [0, 0]}, stderr
    assert json.loads((tmp_path / "2" / "training.json").read_text())["processes"] == 2


@pytest.mark.parametrize(("failures", "codes"), [("2 1:SIGKILL", [1, -9]), ("2 0:disk", [1, 1])])
def test_where_one_fails_the_other_stops_training(failures: str, codes: list[int], tmp_path: Path):
    found, stderr = forks("fail", failures, tmp_path, NOPE)
    assert found == codes, stderr
    assert not (tmp_path / "2" / "training.json").exists()
