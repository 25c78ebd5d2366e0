"""Where one of several processes fails, all end, and one line says which failed and why."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from support.forks import forks

from nope_probe.errors import MachineError
from nope_probe.runtime import peers
from nope_probe.runtime.tensor_files import read_notes

SMALL = ["--model", "nope-tiny", "--layers", "2", "--n-seqs", "61", "--seq-len", "19"]
SCORES = ["scores", *SMALL, "--batch-size", "7"]
MEMORY = "a single sequence, or the model, does not fit into the memory of the device; "
DISK = "state: No space left on device"


def lines_of(stderr: str) -> list[str]:
    """Return the lines on stderr that are no progress bars."""
    return [line for line in stderr.splitlines() if line and "%|" not in line]


@pytest.mark.parametrize(
    ("failures", "codes", "line"),
    [
        ("2 1:mistake", [2, 2], "error: process 1: a mistake"),
        ("2 0:memory", [2, 2], f"error: {MEMORY}"),
        ("2 0:mistake 1:mistake", [2, 2], "error: a mistake"),
        ("3 1:mistake 2:memory", [2, 2, 2], "error: process 1: a mistake"),
        ("2 1:disk", [1, 1], f"error: process 1: {DISK}"),
        ("2 1:SIGKILL", [1, -9], "error: process 1 ended"),
        ("2 0:SIGKILL", [-9, 1], "error: process 0 ended"),
        ("2 1:SIGTERM", [1, 143], "error: process 1 ended: interrupted"),
        ("2 0:SIGTERM 1:SIGTERM", [143, 143], "interrupted: progress was saved; "),
    ],
)
def test_one_line_says_which_process_failed(
    failures: str, codes: list[int], line: str, tmp_path: Path
):
    found, stderr = forks("fail", failures, tmp_path, SCORES)
    assert found == codes, stderr
    (printed,) = lines_of(stderr)
    assert printed.startswith(line)
    computed = not any(word in failures for word in ("mistake", "memory"))
    assert bool(list(tmp_path.glob(".*.unfinished/inputs.safetensors"))) == computed


def test_an_error_of_the_code_has_one_traceback_and_ends_the_others(tmp_path: Path):
    codes, stderr = forks("fail", "2 1:bug", tmp_path, SCORES)
    assert codes == [1, 1], stderr
    assert stderr.count("Traceback") == 1
    assert "\nRuntimeError: a bug\n" in stderr
    assert lines_of(stderr).count("error: process 1 ended: RuntimeError: a bug") == 1


def test_a_process_ends_before_its_last_batch_where_another_one_has_failed(tmp_path: Path):
    codes, stderr = forks("fail", "2 0:slow 1:disk", tmp_path, SCORES)
    assert codes == [1, 1], stderr
    assert "33/33" not in stderr
    assert lines_of(stderr) == [f"error: process 1: {DISK}"]
    codes, stderr = forks("share", "2", tmp_path, SCORES)
    assert codes == {"2": [0, 0]}, stderr


def test_a_process_ends_before_its_last_batch_where_the_first_was_killed(tmp_path: Path):
    codes, stderr = forks("fail", "2 0:SIGKILL 1:slow", tmp_path, SCORES)
    assert codes == [-9, 1], stderr
    assert lines_of(stderr) == ["error: process 0 ended"]
    [state] = tmp_path.glob(".2.unfinished/state-1.partial")
    assert int(read_notes(state)["done"]) < 28 - 7


def test_a_process_of_which_nothing_is_heard_has_ended(monkeypatch: pytest.MonkeyPatch):
    from torch.distributed import PrefixStore, TCPStore

    for name, value in {"EVERY": 0.01, "LISTENING": 1, "SILENCE": 0.1, "PATIENCE": 0.1}.items():
        monkeypatch.setattr(peers, name, value)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 2):
        PrefixStore("peers", server).set(f"beat/{rank}", "7")
    PrefixStore("peers", server).set("done/1", "")  # it has left, which is no failure
    with peers.Peers(server, 0, 3) as others:
        until = time.monotonic() + 9
        while others.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(MachineError, match=r"^process 2 ended$") as raised:
            others.raise_if_ended()
    assert raised.value.prints


def wait_for_ever(port: int, stderr: int) -> None:
    """Wait as on a GPU, where the end of another process breaks nothing."""
    from torch.distributed import TCPStore

    os.dup2(stderr, 2)
    peers.EVERY, peers.GRACE = 0.01, 0.1
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=9))
    with peers.Peers(store, 0, 2) as others, others.waiting():
        time.sleep(60)


def test_a_process_that_no_error_reaches_is_ended(tmp_path: Path):
    from torch.distributed import PrefixStore, TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    record = '{"rank": 1, "code": 2, "text": "why", "printed": false}'
    PrefixStore("peers", server).set("failed/1", record)
    PrefixStore("peers", server).set("failed", "1")
    with (tmp_path / "stderr").open("wb") as stderr:
        pid = os.fork()
        if not pid:
            try:
                wait_for_ever(server.port, stderr.fileno())
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert (tmp_path / "stderr").read_text() == "error: process 1 ended: why\n"
