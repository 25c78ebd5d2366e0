"""The place of a run on disk, and the memory for it, checked before anything is computed.

A place is for one process at a time, and the checks leave it as it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout
from rich.filesize import decimal
from safetensors import SafetensorError

from nope_probe.errors import StorageError, UserError
from nope_probe.files import JsonObject, json_checksum
from nope_probe.run.flags import CommandSettings


def folder_of(settings: CommandSettings, recorded: JsonObject) -> Path:
    """Return the folder of a run: `--out`, or a name of its command, its subject and a hash.

    Args:
        settings: the command's.
        recorded: what identifies the run, as its manifest holds it; the hash is of this.

    Example:
        >>> from nope_probe.ablate import Settings
        >>> folder_of(Settings(model="meta-llama/Llama-3.1-8B"), {"seed": 0}).as_posix()
        'runs/ablate-Llama-3.1-8B-de7d7744'
    """
    if settings.out is not None:
        return output_folder(settings.out)
    subject = Path(settings.subject).name or settings.subject
    name = re.sub(r"[^A-Za-z0-9.]+", "-", subject).strip("-")
    parts = (settings.command, name, json_checksum(recorded)[:8])
    return Path("runs") / "-".join(filter(None, parts))


def output_folder(out: Path) -> Path:
    """Return the folder that `--out` names: a link, `.` or a final `..` is resolved.

    Example:
        >>> output_folder(Path("runs/one")).as_posix()
        'runs/one'
    """
    leads_elsewhere = os.path.islink(out) or out.name in ("", "..")
    return Path(os.path.realpath(out)) if leads_elsewhere else out


def checkpoint_dir(out: Path) -> Path:
    """Return the hidden folder next to the run's folder that keeps it until it is finished."""
    return out.parent / f".{out.name}.unfinished"


def validate_folder_place(out: Path) -> None:
    """Check that a run's folder can be replaced by the finished run; `locked` makes its place.

    Raises:
        UserError: for a file, a mount point or the working directory.
    """
    if os.path.lexists(out) and not os.path.isdir(out):
        what = "file" if os.path.exists(out) else "link that leads nowhere"
        raise UserError(f"cannot write to {out}: it is a {what}")
    if os.path.isdir(out) and (out.samefile(Path.cwd()) or os.path.ismount(out)):
        raise UserError(f"cannot write to {out}: it is in use; name a new folder in it")


_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def validate_memory(n_bytes: int, lower: str) -> None:
    """Check that the memory that a run needs is free.

    Args:
        n_bytes: needed at one time.
        lower: which flags make it smaller.

    Raises:
        UserError: with the estimate and free memory.
    """
    memory = free_memory()
    if n_bytes > memory:
        raise UserError(
            f"this needs at least {decimal(n_bytes)} of memory, and "
            f"{decimal(memory)} are free; lower {lower}"
        )


def free_memory() -> int:
    """Return how much memory of the machine, or of the container, is free, in bytes."""
    memory = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit
        memory = min(memory, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    return memory


LOCK = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process as long as the context lasts, and make it if need be.

    A lock left behind never blocks: the operating system releases the lock of any process that
    ends. An empty folder is removed at the end, with the folders above it that were made for it.

    Raises:
        UserError: if another process holds the folder, or it cannot be made.
    """
    made = [parent for parent in folder.parents if not os.path.isdir(parent)]
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"another process is at work on the run in {folder}") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                for empty in (folder, *made):
                    empty.rmdir()
        lock.release()


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link without its target."""
    shutil.rmtree(path, ignore_errors=True)  # which leaves a file, and a link
    with suppress(OSError):
        path.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces the one at the path once it is complete and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # a full disk gets its room back
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file, which appears complete."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn a failure to write into an error of one line, such as `cannot write x.csv: No space`.

    Raises:
        StorageError: with the operating system's reason.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"cannot write {what}: {reason}") from error
