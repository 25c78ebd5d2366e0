"""Seconds until something moves: python benchmarks/startup.py.

Each command line runs in a process of its own, in turn, as often as there are rounds.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import tyro
from rounds import interleaved_times
from rows import row, show

from nope_probe.studies.commands import COMMANDS


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the import, each command's --help, and what importing TransformerLens costs."""

    rounds: int = 3
    json: bool = False
    """Print the rows as JSON."""


def main(settings: Settings) -> None:
    lines = {
        "python -c pass": ["-c", "pass"],
        "import nope_probe": ["-c", "import nope_probe"],
        "import torch": ["-c", "import torch"],
        "import transformer_lens": ["-c", "import transformer_lens"],
    }
    lines |= {f"{name} --help": ["-m", f"nope_probe.{name}", "--help"] for name in COMMANDS}
    times = interleaved_times(
        {name: partial(run, flags) for name, flags in lines.items()}, settings.rounds
    )
    goals = {"import nope_probe": "under 0.3"} | {f"{name} --help": "under 1" for name in COMMANDS}
    rows = [row(name, each, "s", goal=goals.get(name, "")) for name, each in times.items()]
    show(rows, as_json=settings.json)


def run(flags: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", *flags]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
