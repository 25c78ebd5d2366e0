"""A process of a run: its line of status, its signals, the run's place on disk, free memory.

A place is for one process at a time, and is checked before anything is computed.
`process_group.py` connects several processes; this file needs no torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
from filelock import FileLock, Timeout
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text
from tqdm import tqdm

from nope_probe.errors import MachineError, UserError, printable

Item = TypeVar("Item")
LOG_EVERY = 10  # seconds between two lines of progress in a log file
HEAD_START = 2.0  # seconds until torchrun ends the other processes of a machine
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOPPING = b"\nstopping after this batch; press Ctrl-C again to stop now\n"


class PeerEndedError(MachineError):
    """Raised where another process that shares the run has ended, or does not answer."""


class Interrupted(KeyboardInterrupt):
    """Raised where a signal ends a run; its text says whether progress was saved.

    Attributes:
        signum: the signal's number; a process that it ends exits with 128 more.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def is_first_process() -> bool:
    """Return whether this process is alone, or the first of those that share the run."""
    return os.environ.get("RANK", "0") == "0"


def is_first_of_machine() -> bool:
    """Return whether this process prints the errors of this machine's processes."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def process_count() -> int:
    """Return how many processes torchrun started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def program() -> list[str]:
    """Return the words that started this process, as they can be typed again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        typed = Path(sys.argv[0])
        return ["python", sys.argv[0]] if typed.suffix == ".py" else [typed.name]
    return ["python", "-m", module.name.removesuffix(".__main__")]


@contextmanager
def status(doing: str, *, has_bars: bool = False) -> Iterator[None]:
    """Show a line of status on stderr, with a spinner that is erased at the end.

    Only the first process shows the line, and only on a terminal: a log file gets nothing. Lines
    cannot be nested.

    Args:
        doing: the work in progress, such as `loading TransformerLens`.
        has_bars: whether the work may draw progress bars, as a download does; then the line
            has no spinner and stays.
    """
    if not is_first_process() or not sys.stderr.isatty():
        yield
    elif has_bars:
        sys.stderr.write(f"{printable(doing)} ...\n")
        yield
    else:
        with Console(stderr=True).status("") as shown:
            # Drawn here: the thread that turns the spinner waits while a library is imported.
            shown.update(Text(f"{printable(doing)} ..."), spinner="dots")
            yield


def print_line(line: str) -> None:
    """Write a line on stderr, in the first process."""
    if is_first_process():
        sys.stderr.write(f"{printable(line)}\n")


def progress(**options: Any) -> tqdm:
    """Return a progress bar on stderr, in the first process.

    A log file hears of long work alone, every `LOG_EVERY`.
    """
    often, delay = (0.1, 0) if sys.stderr.isatty() else (LOG_EVERY, LOG_EVERY)
    hidden = not is_first_process()
    return tqdm(file=sys.stderr, mininterval=often, delay=delay, disable=hidden, **options)


def by_layer(layers: Sequence[Item], doing: str) -> Iterator[Item]:
    """Yield what there is of each layer, while a line says which layer of how many is at work."""
    with progress(total=len(layers), leave=False, bar_format="{desc}, {remaining} left") as bar:
        for place, layer in enumerate(layers, 1):
            line = f"{doing}: layer {place} of {len(layers)}"
            bar.set_description_str(line, refresh=sys.stderr.isatty())
            yield layer
            bar.update()


def validate_one_process() -> None:
    """Check that a command which runs in one process was not started in several.

    Raises:
        UserError: if torchrun started several.
    """
    if process_count() > 1:
        raise UserError("only ablate, attention, behaviour and trace run in several processes")


def record_error(error: Exception) -> None:
    """Write an error where the torchrun that started this process reads it, if one did.

    torchrun prints the error that was recorded first, whichever process it ended.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        def fail() -> None:
            raise error from None

        with suppress(type(error)):
            record(fail)()


class Signals:
    """Turns SIGINT and SIGTERM into `Interrupted` for as long as the context lasts.

    A signal raises at once. Inside `deferred` the first signal sets `received`, and
    `raise_if_received` ends the run between two batches; a second signal raises at once.

    When a process ends, the processes that wait for it end by an error; the error is not shown if
    a signal came first.

    Attributes:
        message: the text of `Interrupted`.
        received: the number of the signal that was received; None before.
        is_deferred: whether the first signal waits for the end of a batch.
    """

    def __init__(self, message: str = "nothing was written") -> None:
        self.message = message
        self.received: int | None = None
        self.is_deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self._before = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        stays = isinstance(error, UserError | Interrupted) and not isinstance(error, PeerEndedError)
        if self.received is not None and not stays:
            raise Interrupted(self.received, self.message) from error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the first signal until `raise_if_received`, or to the end of the context."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False
        self.raise_if_received()

    def raise_if_received(self) -> None:
        """Raise the exception of a deferred signal.

        Raises:
            Interrupted: if a signal came.
        """
        if self.received is not None:
            raise Interrupted(self.received, self.message)

    @staticmethod
    @contextmanager
    def end_at_once() -> Iterator[None]:
        """End the process on a signal while it waits for others, in C++, in which no handler runs.

        What is not saved by then is computed again. Outside of the main thread, nothing happens.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        pipe, woken = os.pipe()
        os.set_blocking(woken, False)
        threading.Thread(target=_end_on_signal, args=(pipe,), daemon=True).start()
        before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(woken)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        at_once = not self.is_deferred or self.received is not None
        self.received = signum
        if at_once:
            self.raise_if_received()
        if signum == signal.SIGINT and is_first_process():
            os.write(2, _STOPPING)  # a handler may not use Python's buffered streams


def _end_on_signal(pipe: int) -> None:
    """End the process on the first number in a pipe that is of a signal which ends the run."""
    with os.fdopen(pipe, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            handler = signal.getsignal(number[0])
            signals = getattr(handler, "__self__", None)
            if isinstance(signals, Signals):  # not a handler of the caller
                if is_first_of_machine():
                    said = ": ".join(filter(None, ["interrupted", signals.message]))
                    os.write(2, f"{said}\n".encode())
                os._exit(128 + number[0])


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
