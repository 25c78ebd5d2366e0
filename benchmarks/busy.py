"""A command alone, and next to a process that keeps all cores busy: python benchmarks/busy.py.

The command runs as users start it, and with threads that spin while they wait, which is what
OpenMP does unless `OMP_WAIT_POLICY` says otherwise. The busy process multiplies matrices with as
many threads as there are cores, as a notebook or another run does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from rounds import interleaved_times, ratios
from rows import row, show

POLICIES = {"ablate": {}, "ablate with OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"}}
BESIDE = ", next to a busy process"
BUSY = """
import torch
x = torch.randn(1024, 1024)
print("busy", flush=True)
while True: x @ x
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time a command alone and next to a busy process."""

    rounds: int = 3
    model: str = "rope-tiny"
    n_seqs: int = 64
    seq_len: int = 64
    json: bool = False
    """Print the rows as JSON."""


def main(settings: Settings) -> None:
    ways = {
        name + BESIDE * is_busy: partial(run, settings, policy, is_busy)
        for name, policy in POLICIES.items()
        for is_busy in (False, True)
    }
    times = interleaved_times(ways, settings.rounds)
    rows = [row(f"{name}, alone", times[name], "s") for name in POLICIES]
    rows += [
        row(name + BESIDE, times_alone, "times its time", against=f"{name}, alone")
        for name in POLICIES
        for times_alone in [ratios(times, name + BESIDE, name)]
    ]
    show(rows, as_json=settings.json)


def run(settings: Settings, policy: dict[str, str], is_busy: bool) -> None:
    sizes = {"model": settings.model, "n-seqs": settings.n_seqs, "seq-len": settings.seq_len}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    with busy(is_busy), tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "nope_probe.ablate", *flags, "--out", str(Path(folder, "run"))],
            env=kept | policy,
            check=True,
            capture_output=True,
        )


@contextmanager
def busy(is_busy: bool) -> Iterator[None]:
    """Keep all cores busy with another process, or none, while the context lasts."""
    if not is_busy:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its threads are at work
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
