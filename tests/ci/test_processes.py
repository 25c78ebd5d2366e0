"""Processes that share a run write what one writes, and end together."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from ci.forks import forks
from safetensors.numpy import load_file
from support.rounding import NETWORK, assert_same_table

SMALL = ["--model", "nope-tiny", "--layers", "2", "--n-seqs", "61", "--seq-len", "19"]
SCORES = ["ablate", *SMALL, "--remove", "none", "--per-head", "--batch-size", "7"]
BEHAVIOUR = ["behaviour", "--model", "nope-tiny", "--n-seqs", "23", "--seq-len", "29"]
BEHAVIOUR += ["--measures", "loss", "position", "--remove", "mask", "written"]
BEHAVIOUR += ["--batch-size", "5"]
ABLATE = ["ablate", *SMALL, "--batch-size", "5", "--remove", "w_q", "written"]


@pytest.mark.parametrize("command", [SCORES, ABLATE], ids=["intact", "ablate"])
def test_one_and_three_processes_give_the_same_maps(command: list[str], tmp_path: Path):
    codes, stderr = forks("share", "1,3", tmp_path, command)
    assert codes == {"1": [0], "3": [0, 0, 0]}, stderr
    one, three = (load_file(tmp_path / count / "maps.safetensors") for count in codes)
    assert three.keys() == one.keys()
    for name, alone in one.items():
        assert np.nanmax(np.abs(three[name] - alone)) <= NETWORK * np.nanmax(np.abs(alone))
    assert not list(tmp_path.glob(".*"))


def test_processes_that_share_a_behaviour_run_write_the_same_numbers(tmp_path: Path):
    codes, stderr = forks("share", "1,2", tmp_path, BEHAVIOUR)
    assert codes == {"1": [0], "2": [0, 0]}, stderr
    for name in ("behaviour", "decodability"):
        alone, shared = (
            pd.read_csv(tmp_path / count / f"{name}.csv").select_dtypes("number") for count in "12"
        )
        assert_same_table(shared, alone)


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
    assert lines[0].startswith("running 2 passes;")
    assert len(lines) == 2
    assert lines[1].startswith(line)
    assert list(tmp_path.glob(".*.unfinished/inputs.safetensors"))


@pytest.mark.parametrize("command", [SCORES, ABLATE], ids=["intact", "ablate"])
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
    command += ["-m", "nope_probe.ablate", *SMALL, *arguments]
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
