"""Measure every claim of the README and the documentation, and print one markdown table.

    make bench

Each script runs in a process of its own, on a machine that should do nothing else meanwhile. What
is compared is run in turn within a script, and ratios are taken within a round; memory is the peak
of a process of its own. The table is written to build/bench.md too.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro
from rows import Row, markdown, parse
from tqdm import tqdm

SCRIPTS: dict[str, tuple[str, ...]] = {
    "startup": (),
    "busy": (),
    "fused": ("--rounds=4",),
    "first_layers": ("--rounds=4",),
    "ablate": ("--n-seqs=256",),
    "positions": (),
    "growth": (),
    "long_sequences": (),
    "commands": (),
    "simulation": (),
}
QUICK: dict[str, tuple[str, ...]] = {
    "startup": ("--rounds=1",),
    "busy": ("--rounds=1", "--n-seqs=16"),
    "fused": ("--rounds=2", "--no-memory"),
    "first_layers": ("--rounds=1",),
    "ablate": ("--n-seqs=32",),
    "positions": ("--rounds=1",),
    "growth": ("--rounds=1",),
    "long_sequences": ("--rounds=1", "--quick"),
    "commands": ("--seq-len=2100", "--commands", "ablate"),
    "simulation": ("--n-samples=20000", "--repeats=1"),
}
GPU = "python benchmarks/gpu.py"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Run all benchmarks, or some, and print a table."""

    only: tuple[str, ...] = ()
    """Names of the scripts to run; all by default."""
    quick: bool = False
    """Few rounds: whether all of them work, not numbers to quote."""
    out: Path = Path("build/bench.md")


def main(settings: Settings) -> None:
    unknown = set(settings.only) - set(SCRIPTS)
    if unknown:
        raise SystemExit(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}"
        )
    started = time.perf_counter()
    parts = [f"# Benchmarks\n\n{machine()}\n"]
    for name in tqdm([name for name in SCRIPTS if not settings.only or name in settings.only]):
        flags = QUICK[name] if settings.quick else SCRIPTS[name]
        parts.append(f"## {name}\n\n{markdown(run(name, flags))}\n")
    parts.append(f"{gpu()}\n\nAll of it took {(time.perf_counter() - started) / 60:.0f} minutes.\n")
    table = "\n".join(parts)
    print(table)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(table, encoding="utf-8")


def run(name: str, flags: tuple[str, ...]) -> list[Row]:
    """Run one script and return its rows."""
    script = Path(__file__).with_name(f"{name}.py")
    command = [sys.executable, "-W", "ignore", str(script), "--json", *flags]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return parse(ended.stdout.splitlines()[-1])


def machine() -> str:
    """Return what the numbers were measured on."""
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "transformer_lens")
    )
    return (
        f"{os.cpu_count()} cores ({processor()}), Python {platform.python_version()}, {packages}."
    )


def processor() -> str:
    """Return the processor's name where Linux says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu() -> str:
    """Return whether a GPU was there; its benchmark is a script of its own."""
    import torch

    there = torch.cuda.is_available()
    return f"A GPU is here: `{GPU}`." if there else f"No GPU here. Where there is one: `{GPU}`."


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
