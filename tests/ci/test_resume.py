"""A run that is killed or interrupted at any time is resumed to the same bytes, or refused."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ci.forks import forks

from nope_probe import Sequences, UserError, ablated, load
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.session import Session
from nope_probe.studies.trace import Settings

TEXT = ["--model", "nope-tiny", "--n-seqs", "31", "--batch-size", "3"]
REMOVED = ["--remove", "w_q", "written", "--per-head"]
SHORT = {
    "ablate": [*TEXT, "--layers", "2", "--seq-len", "11", *REMOVED],
    "circuit": [*TEXT, "--layer", "1", "--seq-len", "11", "--remove", "w_q"],
    "behaviour": [*TEXT, "--seq-len", "23", "--measures", "copy", "--remove", "written"],
    "trace": [*TEXT, "--layers", "3", "--seq-len", "11", "--confirm", "1"],
}
# Before which changes on disk a run is stopped: often enough, and not in every second file.
CHANGES = {
    "ablate": "11,13,15",
    "circuit": "7,9,11,13",
    "behaviour": "11,13,15",
    "trace": "13,17,19",
}
# Killed at random moments. Those of `compare` share runs.
LONG = {
    "ablate": SHORT["ablate"],
    "circuit": [*SHORT["circuit"], "--remove", "w_q", "mlp"],
    "behaviour": [*SHORT["behaviour"], "--measures", "copy", "position"],
    "trace": [*SHORT["trace"], "--confirm", "3"],
    "compare": ["one", "two"],
}
# Above 2,048 tokens, where maps have rows of chosen queries.
ROWS = ["--model", "nope-tiny", "--layers", "1", "--seq-len", "2099", "--beyond-context", "--pack"]
ROWS += ["--n-seqs", "7", "--folds", "4", "--batch-size", "1"]
ROWS += ["--query-rows", "67"]
# What may differ between two runs: when they ended, how long they took, and what covers these.
VARYING = ("finished", "seconds", "checksum")
VARYING_LINES = re.compile(
    rb"&#34;(finished|seconds)&#34;: .*\n|<dt>(finished|seconds)</dt><dd>[^<]*</dd>"
)


def results(folder: Path) -> dict[str, bytes | dict]:
    """Return the content of all files in a folder, less what may differ between two runs."""
    found: dict[str, bytes | dict] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name == "manifest.json":
            manifest = json.loads(path.read_text().replace(str(folder), ""))
            manifest["checksums"].pop("report.html")
            found[name] = {key: each for key, each in manifest.items() if key not in VARYING}
        elif path.name == "report.html":
            found[name] = VARYING_LINES.sub(b"", path.read_bytes().replace(bytes(folder), b""))
        elif path.is_file() and "checkpoint-" not in name and path.suffix != ".bin":
            found[name] = path.read_bytes()
    return found


def assert_same_results(tmp_path: Path, n_runs: int) -> None:
    undisturbed = results(tmp_path / "undisturbed")
    assert undisturbed
    for run in range(n_runs):
        found = results(tmp_path / str(run))
        assert found.keys() == undisturbed.keys()  # and so nothing was left
        assert [name for name in found if found[name] != undisturbed[name]] == []


@pytest.mark.parametrize("command", SHORT)
def test_killed_before_changes_on_disk_a_run_ends_in_the_same_bytes(command: str, tmp_path: Path):
    report, stderr = forks("step", f"9 {CHANGES[command]}", tmp_path, [command, *SHORT[command]])
    assert report["code"] == 0, stderr
    assert len(report["ends"]) >= 3
    assert report["resumed"] >= 2
    assert_same_results(tmp_path, 1)


def test_killed_in_the_middle_of_long_sequences_the_sums_of_rows_resume_to_the_same_bytes(
    tmp_path: Path,
):
    report, stderr = forks("step", "9 13", tmp_path, ["ablate", "--remove", "none", *ROWS])
    assert report["code"] == 0, stderr
    assert report["resumed"] >= 1
    assert_same_results(tmp_path, 1)


@pytest.mark.parametrize("command", SHORT)
def test_a_signal_ends_a_run_in_one_line_and_it_resumes_to_the_same_bytes(
    command: str, tmp_path: Path
):
    signum = signal.SIGINT if command == "ablate" else signal.SIGTERM
    steps = f"{signum:d} {CHANGES[command]}"
    report, stderr = forks("step", steps, tmp_path, [command, *SHORT[command]])
    assert report["code"] == 0, stderr
    assert {*report["ends"]} == {128 + signum}
    said = [line for line in stderr.splitlines() if "interrupted" in line]
    assert len(said) == len(report["ends"]) >= 1
    # Alone where the run is written already.
    assert all(line == "interrupted" or line.startswith("interrupted: ") for line in said)
    assert any(line.endswith("run the same command to resume") for line in said)
    assert "Traceback" not in stderr
    done = [int(n) for n in re.findall(r"running \d+ passes, (\d+) of them done before", stderr)]
    assert done == sorted(done)
    assert done
    assert_same_results(tmp_path, 1)


@pytest.mark.parametrize("command", LONG)
def test_killed_at_random_moments_and_at_the_final_write_a_run_ends_in_the_same_bytes(
    command: str, tmp_path: Path
):
    if command == "compare":
        for name, seed in (("one", "0"), ("two", "1")):
            forks("kill", "0", tmp_path / name, ["ablate", *SHORT["ablate"], "--seed", seed])
    given = [
        str(tmp_path / each / "undisturbed" / "run") if each in ("one", "two") else each
        for each in LONG[command]
    ]
    report, stderr = forks("kill", "4", tmp_path / "kills", [command, *given])
    assert report["code"] == 0, stderr
    assert report["kills"] == 4
    assert_same_results(tmp_path / "kills", report["runs"])


def interrupt(folder: Path) -> None:
    """Finish the first of two streams of 11, and two batches of the second."""
    with suppress(KeyboardInterrupt), RunCheckpoint(folder) as run:
        run.save("a", {"sum": torch.ones(3)})
        with run.progress({"a": 11, "b": 11}), run.stream("b") as stream:
            for size in (3, 2):
                stream.advance(size)
            raise KeyboardInterrupt


def test_a_resumed_run_counts_nothing_twice(tmp_path: Path) -> None:
    interrupt(tmp_path / "run")
    with RunCheckpoint(tmp_path / "run") as run, run.progress({"a": 11, "b": 11}):
        with run.stream("b") as stream:
            for size in (3, 2, 6):
                stream.advance(size)
        assert run.bar is not None
        assert run.bar.n == 22


def at_the_last_position(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return torch.cat((tensor[:, :-1], 3 * tensor[:, -1:]), 1)


@contextmanager
def grown(tensor: torch.Tensor) -> Iterator[None]:
    """Change one number of a tensor."""
    first = tensor.data[(0,) * tensor.ndim]
    before = first.clone()
    first += 1e-3
    yield
    first.copy_(before)


def frequencies(model: Any) -> torch.Tensor:
    """Return a buffer that is not stored with the weights."""
    names = ("rotary_sin", "inv_freq")  # of a HookedTransformer, and of a bridge
    return next(x for name, x in model.named_buffers() if name.endswith(names))


STATES: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "without the mask": lambda model: ablated(model, "mask"),
    "a hook": lambda model: model.hooks([("blocks.0.hook_resid_pre", at_the_last_position)]),
    "a hook of PyTorch": lambda model: model.blocks[0].mlp.register_forward_hook(
        lambda module, args, output: 2 * output
    ),
    "a buffer": lambda model: grown(frequencies(model)),
    "a weight": lambda model: grown(model.blocks[1].attn.W_Q),
}


@pytest.mark.parametrize("state", STATES)
def test_an_unfinished_run_is_resumed_with_the_same_weights_buffers_and_hooks_alone(
    state: str, tmp_path: Path
) -> None:
    settings = Settings(model="rope-tiny", n_seqs=17, seq_len=23, out=tmp_path / "run", confirm=0)
    loaded: Any = load("rope-tiny")

    def start() -> Sequences:
        with Session(settings, model=loaded).opened() as session:
            return session.sequences()

    first = start()
    error = pytest.raises(UserError, match=r"run.unfinished holds an unfinished run with other")
    with STATES[state](loaded.model), error:
        start()
    assert torch.equal(start().inputs, first.inputs)
