"""A run that is killed or interrupted at any time ends in the same bytes as one that is not."""

import signal
from pathlib import Path

import pytest
from support.forks import forks

SCORES = ["scores", "--model", "nope-tiny", "--layers", "3", "--seq-len", "37"]
ABLATE = ["ablate", "--model", "nope-tiny", "--layers", "2", "--seq-len", "19"]
ABLATE += ["--n-seqs", "61", "--players", "mask", "w_q", "--reparametrise", "1"]
CIRCUIT = ["circuit", "--layer", "1", "--seq-len", "23", "--remove", "w_q", "mlp"]
BEHAVIOUR = ["behaviour", "--model", "nope-tiny", "--n-seqs", "23", "--seq-len", "29"]
BEHAVIOUR += ["--measures", "copy", "position", "--remove", "mask", "w_q"]
SIMULATE = ["simulate", "--alpha", "0", "0.3", "--rope", "--n-layers", "3", "--seq-len", "29"]


def results(run: Path) -> dict[str, bytes]:
    """The arrays and tables of a run."""
    files = [*run.glob("*.safetensors"), *run.glob("*.csv")]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("kills", "command"),
    [
        ("20", [*SCORES, "--n-seqs", "499", "--batch-size", "3", "--checkpoint-every", "2"]),
        ("5", [*ABLATE, "--batch-size", "5", "--checkpoint-every", "2"]),
        ("5", [*CIRCUIT, "--n-seqs", "199", "--batch-size", "3", "--checkpoint-every", "2"]),
        ("2", [*BEHAVIOUR, "--batch-size", "5", "--checkpoint-every", "2"]),
        ("5", [*SIMULATE, "--n-samples", "2999", "--checkpoint-every", "2"]),
    ],
    ids=["scores", "ablate", "circuit", "behaviour", "simulate"],
)
def test_killed_at_random_moments_a_run_ends_in_the_same_bytes(
    kills: str, command: list[str], tmp_path: Path
):
    report, _ = forks("kill", kills, tmp_path, command)
    assert report["code"] == 0
    assert report["kills"] == int(kills)
    assert report["resumed"] > 0
    uninterrupted = results(tmp_path / "uninterrupted")
    held = "behaviour.csv" if command[0] == "behaviour" else "maps.safetensors"
    assert held in uninterrupted
    for run in range(report["runs"]):
        assert results(tmp_path / f"run-{run}") == uninterrupted
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_progress_and_says_so(signum: int, code: int, tmp_path: Path):
    command = [*SCORES, "--n-seqs", "1499", "--batch-size", "3", "--checkpoint-every", "1000000"]
    report, stderr = forks("stop", str(int(signum)), tmp_path / "run", command)
    assert (report["stopped"], report["again"]) == (code, 0)
    assert report["left"] == ["about.json", "inputs.safetensors", "lock", "state-0.partial"]
    message = "interrupted: progress was saved; run the same command to resume"
    assert message in stderr.splitlines()
    assert (tmp_path / "run" / "manifest.json").is_file()
    assert not list(tmp_path.glob(".*"))
