"""Simulate the parameter-free transformer: mean scores of every layer, beside their theory."""

from __future__ import annotations

import sys

from nope_probe.command import run_command
from nope_probe.simulation_run import Settings, run


def main() -> None:
    """Run the command line."""
    run_command(Settings, simulate)


def simulate(settings: Settings) -> None:
    """Run a simulation, or show it again if it is finished."""
    from nope_probe.results import read_manifest

    out = run(settings)
    lines = [*read_manifest(out)["answer"], f"report: {out / 'report.html'}"]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
