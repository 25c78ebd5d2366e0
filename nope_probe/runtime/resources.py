"""What a run needs at least of memory and disk, held against what the machine has."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from nope_probe.errors import UserError
from nope_probe.runtime.folder import checkpoint_dir

NUMBER = 8  # bytes: tokens are int64, sums float64
PAGE = 4_800_000  # bytes: the script of the page, which draws its figures
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs at least, in bytes: what it cannot do without, and no more.

    Attributes:
        memory: at one time.
        disk: for the arrays in the run's folder.
    """

    memory: int = 0
    disk: int = 0


def validate_room(needs: Needs, folder: Path | None, lower: str) -> None:
    """Check that a run fits into the machine's memory and onto the disk of its folder.

    Args:
        needs: of the run.
        folder: where it is written, whether or not it exists; None for nowhere.
        lower: which flags make it smaller.

    Raises:
        UserError: with the estimate, and what is here.
    """
    memory = memory_here()
    if memory is not None and needs.memory > memory:
        raise UserError(
            f"this needs at least {in_bytes(needs.memory)} of memory, and {in_bytes(memory)} are "
            f"here; lower {lower}"
        )
    if folder is None:
        return
    free, missing = disk_here(folder), PAGE + max(0, needs.disk - saved(folder))
    if free is not None and missing > free:
        raise UserError(
            f"this needs at least {in_bytes(missing)} of disk space, and {in_bytes(free)} are "
            f"free at {folder}; lower {lower}"
        )


def saved(folder: Path) -> int:
    """Return how many bytes an unfinished run has saved already."""
    files = checkpoint_dir(folder).rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def memory_here() -> int | None:
    """Return how much memory the machine, or the container, has in bytes; None if unknown."""
    found = []
    if hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for each in _CGROUP_LIMITS:
        try:
            text = Path(each).read_text(encoding="ascii").strip()
        except OSError:
            continue
        found += [int(text)] if text.isdecimal() else []
    return min(found, default=None)


def disk_here(folder: Path) -> int | None:
    """Return how many bytes are free on the disk that would hold a folder; None if unknown."""
    for each in (folder.absolute(), *folder.absolute().parents):
        try:
            return shutil.disk_usage(each).free
        except OSError:
            continue
    return None


def in_bytes(n: int) -> str:
    """Return a number of bytes as people write it.

    Example:
        >>> in_bytes(4_100_000_000_000), in_bytes(24_000_000_000), in_bytes(12)
        ('4.1 TB', '24 GB', '12 B')
    """
    amount, units = float(min(n, 10**24)), ["B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB"]
    unit = units.pop(0)
    while amount >= 999.5 and units:
        amount, unit = amount / 1000, units.pop(0)
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"


def bytes_of_maps(n_maps: int, seq_len: int) -> int:
    """Return the bytes of square maps in float64.

    Example:
        >>> bytes_of_maps(2, 10)
        1600
    """
    return n_maps * seq_len**2 * NUMBER
