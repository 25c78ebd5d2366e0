"""Commands in forks of one process that has everything imported: cheap to start, kill and repeat.

    python forks.py kill N OUT COMMAND ...        kill it N times, over as many runs as that takes
    python forks.py share 1,2 OUT COMMAND ...     run it in 1 process, then in 2 that share it
    python forks.py stop SIGNAL OUT COMMAND ...   send it a signal under way, and start it again

The report is JSON, the last line on stderr.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import torch


def forks(what: str, argument: str, out: Path, command: list[str]) -> tuple[dict, str]:
    """Run this file, and return its report and all that was written to stderr."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, what, argument, str(out), *command],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stderr.splitlines()[-1]), ended.stderr


def start(command: str, arguments: list[str], **environment: str) -> int:
    """Fork a process that runs a command and ends."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(environment)
    # A fork has no thread pool; made here, threads that load a model do not race to make one.
    torch.set_num_threads(1)
    sys.argv = [command, *arguments]
    code = 0
    try:
        import_module(f"nope_probe.{command}").main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001  (a fork must never return into its parent's code)
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(count: str, out: Path, command: str, arguments: list[str]) -> dict[str, object]:
    """Kill a command at random moments until it has been killed often enough and has ended."""
    chance, kills, runs, resumed, ended = random.Random(0), 0, 0, 0, 0
    begin = time.monotonic()
    code = exit_code(start(command, [*arguments, "--out", str(out / "uninterrupted")]))
    duration = time.monotonic() - begin
    while not code and (kills < int(count) or ended):
        pid = start(command, [*arguments, "--out", str(out / f"run-{runs}")])
        if kills < int(count):
            time.sleep(chance.uniform(0, duration))
            os.kill(pid, signal.SIGKILL)
        ended = exit_code(pid)
        if ended == -signal.SIGKILL:
            kills += 1
            left = out / f".run-{runs}.unfinished"
            resumed += any([*left.glob("*.safetensors"), *left.glob("state-*.partial")])
        else:
            code, runs = ended, runs + 1
    return {"code": code, "kills": kills, "runs": runs, "resumed": resumed}


def share(counts: str, out: Path, command: str, arguments: list[str]) -> dict[str, object]:
    """Run a command in processes that share it, as torchrun starts them."""
    return {count: share_among(count, out, command, arguments) for count in counts.split(",")}


def share_among(count: str, out: Path, command: str, arguments: list[str]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given = [*arguments, "--out", str(out / count)]
    pids = [
        start(command, given, **common, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(int(count))
    ]
    return [exit_code(pid) for pid in pids]


def stop(signum: str, out: Path, command: str, arguments: list[str]) -> dict[str, object]:
    """Send a signal to a command once it is streaming, and start it again."""
    folder = out.parent / f".{out.name}.unfinished"
    pid = start(command, [*arguments, "--out", str(out)])
    while not (folder / "inputs.safetensors").exists():
        time.sleep(0.001)
    time.sleep(0.2)
    os.kill(pid, int(signum))
    stopped = exit_code(pid)
    left = sorted(path.name for path in folder.iterdir())
    again = exit_code(start(command, [*arguments, "--out", str(out)]))
    return {"stopped": stopped, "left": left, "again": again}


if __name__ == "__main__":
    from nope_probe import load

    torch.set_num_threads(1)
    for name in (
        "scores",
        "ablate",
        "circuit",
        "simulate",
        "experiments.ablation.conditions",
        "experiments.ablation.analyse",
        "experiments.circuit.analyse",
        "experiments.scores.analyse",
        "experiments.simulation.analyse",
    ):
        import_module(f"nope_probe.{name}")
    load("nope-tiny")
    what, argument, out, command, *arguments = sys.argv[1:]
    action = {"kill": kill, "share": share, "stop": stop}[what]
    report = action(argument, Path(out), command, arguments)
    sys.stderr.write(json.dumps(report) + "\n")
