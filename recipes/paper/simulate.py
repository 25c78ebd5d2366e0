"""Simulate the parameter-free transformer, next to its theory."""

from __future__ import annotations

from nope_probe.cli import command
from simulation_settings import Settings

main = command(Settings)

if __name__ == "__main__":
    main()
