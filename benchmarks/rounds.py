"""Times and memory of several ways to do the same, taken so that they can be compared."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

Way = TypeVar("Way", bound=str)


def interleaved_times(
    ways: Mapping[Way, Callable[[], object]], rounds: int, *, warm_up: bool = True
) -> dict[Way, list[float]]:
    """Time each way once a round, one after the other, so that a busy machine slows all alike.

    Args:
        ways: what to run, by name.
        rounds: rounds that count.
        warm_up: whether one round before them is left out.
    """
    times: dict[Way, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + warm_up):
        for name, run in ways.items():
            times[name].append(seconds(run))
    return {name: each[warm_up:] for name, each in times.items()}


def ratios(times: Mapping[Way, list[float]], way: Way, against: Way) -> list[float]:
    """Return one way's time over another's in the same round, for each round."""
    return [a / b for a, b in zip(times[way], times[against], strict=True)]


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes by the wall clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_rise(run: Callable[[], object]) -> tuple[float, float]:
    """Return the memory before a call and how far its peak lies above that, MB (Linux)."""
    # What building the model took at its peak would hide what follows: reset it.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    run()
    return before, resident("VmHWM") - before


def resident(name: str) -> float:
    """Return a field of /proc/self/status, MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def peak_memory() -> float:
    """Return this process's peak so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
