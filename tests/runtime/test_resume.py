"""A run that is killed or interrupted at any time ends in the same bytes as one that is not."""

import signal
from pathlib import Path

import pytest
from support.forks import forks

SCORES = ["scores", "--model", "nope-tiny", "--layers", "3", "--seq-len", "37"]
ABLATE = ["ablate", "--model", "nope-tiny", "--layers", "2", "--seq-len", "19"]
ABLATE += ["--n-seqs", "61", "--players", "mask", "w_q", "--reparametrise", "1"]


def arrays(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("kills", "command"),
    [
        ("20", [*SCORES, "--n-seqs", "499", "--batch-size", "3", "--checkpoint-every", "2"]),
        ("5", [*ABLATE, "--batch-size", "5", "--checkpoint-every", "2"]),
    ],
)
def test_killed_at_random_moments_a_run_ends_in_the_same_bytes(
    kills: str, command: list[str], tmp_path: Path
):
    told, _ = forks("kill", kills, tmp_path, command)
    assert told["code"] == 0
    assert told["kills"] == int(kills)
    assert told["resumed"] > 0
    whole = arrays(tmp_path / "whole")
    assert {"maps.safetensors", "tokens.safetensors"} <= set(whole)
    for run in range(told["runs"]):
        assert arrays(tmp_path / f"run-{run}") == whole
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_done_and_says_so(signum: int, code: int, tmp_path: Path):
    command = [*SCORES, "--n-seqs", "1499", "--batch-size", "3", "--checkpoint-every", "1000000"]
    told, stderr = forks("stop", str(int(signum)), tmp_path / "run", command)
    assert (told["stopped"], told["again"]) == (code, 0)
    assert told["left"] == ["about.json", "inputs.safetensors", "lock", "state-0.partial"]
    said = "interrupted: progress was saved; run the same command to resume"
    assert said in stderr.splitlines()
    assert (tmp_path / "run" / "manifest.json").is_file()
    assert not list(tmp_path.glob(".*"))
