"""The lock on a run's unfinished folder: one command at a time works on a run.

The operating system releases the lock of a process that ends, however it ends, so that a lock
which was left behind never blocks.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from nope_probe.errors import UserError
from nope_probe.files import read_json, validate_regular_files

LOCK, HOLDER = "lock", "process.json"


class LockedError(UserError):
    """Raised where another process is at work on a run."""


class FolderLock:
    """Holds a folder for this process as long as the context lasts, and makes it if need be.

    A folder in which nothing was left is removed at the end, with the folders above it that were
    made for it.

    Args:
        folder: the folder.

    Raises:
        LockedError: on entering, if another process holds it; it is named.
        UserError: on entering, if the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK)
        # Folders above this one that did not exist, innermost first.
        self._made: list[Path] = []

    def __enter__(self) -> FolderLock:
        if self._lock.is_locked:  # by this object: a session and its checkpoint share one
            self._lock.acquire()
            return self
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            validate_regular_files(self.folder)
            self._lock.acquire(timeout=0)
            self._write_holder()
        except Timeout as error:
            raise LockedError(
                f"{holder(self.folder)} is at work on the run in {self.folder}"
            ) from error
        except OSError as error:
            self._lock.release()
            raise UserError(f"cannot write to {self.folder}: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock.lock_counter > 1:
            self._lock.release()
            return
        with suppress(OSError):
            (self.folder / HOLDER).unlink(missing_ok=True)
            if self.is_empty():
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()
                for folder in self._made:
                    folder.rmdir()
        self._lock.release()

    def _write_holder(self) -> None:
        record = {"pid": os.getpid(), "host": socket.gethostname()}
        (self.folder / HOLDER).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def is_empty(self) -> bool:
        """Return whether the folder holds nothing but the lock."""
        return all(path.name in (LOCK, HOLDER) for path in self.folder.iterdir())

    def clear(self) -> None:
        """Remove everything in the folder but the lock."""
        for path in list(self.folder.iterdir()):
            if path.name not in (LOCK, HOLDER):
                remove(path)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def holder(folder: Path) -> str:
    """Return which process holds a folder, in words."""
    try:
        found = read_json(folder / HOLDER)
        pid, host = int(found["pid"]), str(found["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
    return f"process {pid}" + ("" if host == socket.gethostname() else f" on {host}")
