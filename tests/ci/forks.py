"""Commands in forks of one process that has everything imported: cheap to start, kill and repeat.

The process is started once, by the first test that needs it, and takes one request after the other.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryFile

import torch
from support.command_line import module_of

CHANGES = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")  # functions of `os`


def forks(what: str, argument: str, out: Path, command: list[str]) -> tuple[dict, str]:
    """Run a command in forks, and return the report and all that was written to stderr.

    Args:
        what: `kill`, `step`, `share`, `fail`: the function below.
        argument: its first argument.
        out: a folder. Each run of `step` and `kill` has a folder of its own there and writes `run`
            in it; the one that is not disturbed is in `undisturbed`.
        command: the command and its arguments.
    """
    process = server()
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018
    process.stdin.write(json.dumps([what, argument, str(out), command]) + "\n")
    process.stdin.flush()
    reply = process.stdout.readline()
    assert reply, "the process of forks has ended"
    report, stderr = json.loads(reply)
    return report, stderr


@cache
def server() -> subprocess.Popen[str]:
    """Start this file, which ends with the process that started it."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),  # with the folders that pytest adds
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve() -> None:
    """Answer requests, a line of JSON each, until there are no more."""
    answers = os.dup(1)
    prepare()
    for line in sys.stdin:
        what, argument, out, (command, *arguments) = json.loads(line)
        action = {"kill": kill, "step": step, "share": share, "fail": fail}[what]
        with TemporaryFile() as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            signal.alarm(3000)  # a command that hangs ends here, and with it the test
            Path(out).mkdir(exist_ok=True)
            report = action(argument, Path(out), command, arguments)
            printed.seek(0)
            text = printed.read().decode()
        os.write(answers, (json.dumps([report, text]) + "\n").encode())


def start(
    command: str, arguments: list[str], change: int = 0, signum: int = 0, **environment: str
) -> int:
    """Fork a process that runs a command, and gets a signal before one of its changes on disk."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(environment)
    # A fork has no thread pool; made here, threads that load a model do not race to make one.
    torch.set_num_threads(1)
    sys.argv = [command, *arguments]
    code = 0
    if change:
        get_signal_before(change, signum)
    if "FAILURE" in environment:
        import_module("ci.failures").fail_in_second_batch(environment["FAILURE"])
    try:
        module_of(command).main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001  (a fork must never return into its parent's code)
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def get_signal_before(change: int, signum: int) -> None:
    """Send this process a signal before one of its changes on disk, counted from 1."""
    left = change

    def counted(function: Callable) -> Callable:
        def call(*args: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signum)
            return function(*args, **options)

        return call

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begin(
    folder: Path, command: str, arguments: list[str], change: int = 0, signum: int = 0
) -> int:
    """Start a command that writes `run` in a folder, or resume it."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    return start(command, [*arguments, "--out", "run"], change, signum)


def has_progress(folder: Path) -> bool:
    """Return whether an ended process left something to resume from."""
    left = [*folder.glob(".*.unfinished/*.safetensors")]
    return bool(left or [*folder.glob("run/checkpoint-*/checksums.json")])


def step(argument: str, out: Path, command: str, arguments: list[str]) -> dict[str, object]:
    """Send a command a signal before one change on disk after the other, until it ends by itself.

    Args:
        argument: the signal, and before which changes: `9 5,7`, before the 5th, the 7th, the 5th.
        out: the folder of the runs.
        command: the command.
        arguments: its arguments.
    """
    number, changes = argument.split()
    signum, resumed, ends = int(number), 0, []
    code = exit_code(begin(out / "undisturbed", command, arguments))
    for change in cycle(map(int, changes.split(","))):
        if code or len(ends) > 60:
            break
        code = exit_code(begin(out / "0", command, arguments, change, signum))
        if code not in (-signum, 128 + signum):
            break
        ends.append(code)
        resumed += has_progress(out / "0")
        code = 0
    return {"code": code, "ends": ends, "runs": 1, "resumed": resumed}


def kill(count: str, out: Path, command: str, arguments: list[str]) -> dict[str, object]:
    """Kill a command at random moments, every other time while its results are being written."""
    chance, attempts, kills, runs, resumed, aimed, ended = random.Random(0), 0, 0, 0, 0, 0, 0
    begun = time.monotonic()
    code = exit_code(begin(out / "undisturbed", command, arguments))
    duration = time.monotonic() - begun
    while not code and (kills < int(count) or ended):
        folder = out / str(runs)
        pid = begin(folder, command, arguments)
        if kills < int(count):
            attempts += 1
            wrote = attempts % 2 == 0 and wait_for_results(folder, pid, duration)
            time.sleep(chance.uniform(0, 0.1 if wrote else duration))
            os.kill(pid, signal.SIGKILL)
        ended = exit_code(pid)
        if ended == -signal.SIGKILL:
            kills += 1
            aimed += wrote
            resumed += has_progress(folder)
        else:
            code, runs = ended, runs + 1
    return {"code": code, "kills": kills, "aimed": aimed, "runs": runs, "resumed": resumed}


def wait_for_results(folder: Path, pid: int, duration: float) -> bool:
    """Wait until a command begins to write its results; return False if it does not."""
    last = time.monotonic() + 3 * duration
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while time.monotonic() < last and os.waitid(os.P_PID, pid, ended) is None:
        if [*folder.glob(".*.unfinished/run"), *folder.glob("run/config.json")]:
            return True
        time.sleep(0.001)
    return False


def share(counts: str, out: Path, command: str, arguments: list[str]) -> dict[str, object]:
    """Run a command in processes that share it, as torchrun starts them."""
    return {count: share_among(count, out, command, arguments) for count in counts.split(",")}


def fail(argument: str, out: Path, command: str, arguments: list[str]) -> list[int]:
    """Run a command in processes that share it, some of which fail in their second batch.

    Args:
        argument: how many processes, and how each of them fails that does: `2 0:slow 1:disk`.
        out: where the run is written.
        command: the command.
        arguments: its arguments.
    """
    count, *which = argument.split()
    failures = {int(rank): failure for rank, failure in (item.split(":") for item in which)}
    return share_among(count, out, command, arguments, failures)


def share_among(
    count: str,
    out: Path,
    command: str,
    arguments: list[str],
    failures: Mapping[int, str] | None = None,
) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common["ACCELERATE_USE_CPU"] = "true"  # Trainer shares no run otherwise without GPUs
    given = [*arguments, "--out", str(out / count)]
    pids = []
    for rank in range(int(count)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if failures is not None and rank in failures:
            own["FAILURE"] = failures[rank]
        pids.append(start(command, given, **common, **own))
    return [exit_code(pid) for pid in pids]


def prepare() -> None:
    """Import what commands need, so that their forks have it."""
    torch.set_num_threads(1)
    names = ["ablate", "circuit", "compare", "trace"]
    studies = ("ablate", "behaviour", "circuit", "trace")
    names += [f"studies.{name}_run" for name in studies]
    for name in names:
        import_module(f"nope_probe.{name}")
    import_module("nope_probe").load("nope-tiny")


if __name__ == "__main__":
    serve()
