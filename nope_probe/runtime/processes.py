"""How processes share a run: the first one's line of status, torchrun, the process group, signals.

torchrun watches the processes that it starts. When one of them fails, torchrun sends SIGTERM to the
others, which save their progress, and prints the error that the first one recorded.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from nope_probe.errors import MachineError, UserError, printable

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

JOIN_TIMEOUT = timedelta(minutes=5)  # in which all processes have to start
# The longest wait for the first process, which may stream a data set or write a large run.
TIMEOUT = timedelta(hours=3)
PATIENCE = 2.0  # seconds of work that a log file hears nothing of
HEAD_START = 2.0  # seconds until torchrun ends the other processes of a machine
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOPPING = b"\nstopping after this batch; press Ctrl-C again to stop now\n"
Value = TypeVar("Value")


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


@contextmanager
def status(doing: str, *, has_bars: bool = False, in_logs: bool = False) -> Iterator[None]:
    """Show a line of status on stderr, with a spinner that is erased at the end.

    Only the first process shows the line, and by default only on a terminal: a log file gets
    nothing. Lines cannot be nested.

    Args:
        doing: the work in progress, such as `loading TransformerLens`.
        has_bars: whether it may draw progress bars of its own, as a download does; then the line
            has no spinner and stays.
        in_logs: whether a log file gets the line too, if the work takes longer than two seconds.
    """
    if not is_first_process():
        yield
    elif not sys.stderr.isatty():
        line = f"{printable(doing)} ...\n"
        late = threading.Timer(PATIENCE, sys.stderr.write, (line,))
        late.daemon = True
        if in_logs:
            late.start()
        try:
            yield
        finally:
            late.cancel()
    elif has_bars:
        sys.stderr.write(f"{printable(doing)} ...\n")
        yield
    else:
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("") as shown:
            # Drawn here: the thread that turns the spinner waits while a library is imported.
            shown.update(Text(f"{printable(doing)} ..."), spinner="dots")
            yield


def validate_one_process() -> None:
    """Check that a command which runs in one process was not started in several.

    Raises:
        UserError: if torchrun started several.
    """
    if process_count() > 1:
        raise UserError(
            "only ablate, behaviour, scores, trace and the figures of language models run in "
            "several processes"
        )


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


def meet() -> tuple[Store, int, int]:
    """Return the store that all processes share, this process's rank, and their number.

    Raises:
        MachineError: if torchrun did not tell this process where and which of several it is, nobody
            keeps a store there, or the others do not come.
    """
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    try:
        return next(rendezvous("env://", timeout=JOIN_TIMEOUT))
    except (DistError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")[:200]
        raise MachineError(
            f"{process_count()} processes did not meet within {JOIN_TIMEOUT.seconds} s ({reason}): "
            "start all of them with torchrun, or unset WORLD_SIZE"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Processes:
    """A process that shares a run with others; alone by default.

    Attributes:
        rank: its number, from 0.
        count: how many processes there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def n_own(self, n_seqs: int, batch_size: int) -> int:
        """Return how many of the sequences, in batches of a size, this process runs."""
        from nope_probe.hooks.reading.streaming import batches_of

        batches = batches_of(n_seqs, batch_size, self.rank, self.count)
        return sum(stop - start for start, stop in batches)

    def all_reduce(self, totals: Sequence[torch.Tensor]) -> None:
        """Replace totals by their sums over all processes.

        Raises:
            PeerEndedError: if another process has ended.
        """
        if self.count == 1:
            return
        import torch
        import torch.distributed as dist

        with _waiting():
            for total in totals:
                summed = total.to(_device()).contiguous()
                dist.all_reduce(summed)
                total.copy_(summed)
            if _device().type == "cuda":
                torch.cuda.synchronize()

    def broadcast(self, value: Value) -> Value:
        """Return the first process's value in every process.

        Raises:
            PeerEndedError: if another process has ended.
        """
        if self.count == 1:
            return value
        import torch.distributed as dist

        values = [value]
        with _waiting():
            dist.broadcast_object_list(values, src=0, device=_device())
        return values[0]

    def barrier(self) -> None:
        """Wait until every process has called this.

        Raises:
            PeerEndedError: if another process has ended.
        """
        if self.count > 1:
            import torch.distributed as dist

            with _waiting():
                dist.barrier()


def _device() -> torch.device:
    """Return the device through which the processes communicate."""
    import torch
    import torch.distributed as dist

    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextmanager
def _waiting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's only class for a closed connection
        time.sleep(2 * HEAD_START)  # meanwhile torchrun ends this process, and prints why
        raise PeerEndedError(
            "another process of this run has ended, or has not answered for "
            f"{TIMEOUT.seconds // 3600} hours; the same command resumes the run"
        ) from error


@contextmanager
def process_group(device: str) -> Iterator[Processes]:
    """Join the other processes of a torchrun, if there are any, for as long as the context lasts.

    They communicate through NCCL on GPUs and through Gloo elsewhere. A process that has left the
    group cannot join it again: runs that follow one another share a context around them all.

    Args:
        device: of this process.

    Raises:
        MachineError: if the others are not there in time.
    """
    if process_count() == 1:
        yield Processes()
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield Processes(rank=dist.get_rank(), count=dist.get_world_size())
        return
    store, rank, count = meet()
    store.set_timeout(TIMEOUT)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    shared: dict[str, Any] = {"store": store, "rank": rank, "world_size": count}
    with _waiting():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, **shared)
    try:
        yield Processes(rank=rank, count=count)
    finally:
        dist.destroy_process_group()


def own_device(device: str) -> str:
    """Return this process's device: `auto` is a GPU where there is one, under torchrun its own.

    Raises:
        UserError: if the machine does not have it, or it holds no numbers.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"no device {device!r} on this machine") from error
    return device


class Signals:
    """Turns SIGINT and SIGTERM into `Interrupted` for as long as the context lasts.

    A signal raises at once. Inside `deferred` the first signal sets `received`, and
    `raise_if_received` ends the run between two batches; a second signal raises at once.

    When a process ends, the processes that wait for it end by an error; the error is not shown if
    a signal came first.

    Attributes:
        message: the text of `Interrupted`.
        received: the number of the signal that was received; None before.
    """

    def __init__(self, message: str = "nothing was written") -> None:
        self.message = message
        self.received: int | None = None
        self._is_deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self._before = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        own = isinstance(error, UserError | Interrupted) and not isinstance(error, PeerEndedError)
        if self.received is not None and not own:
            raise Interrupted(self.received, self.message) from error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the first signal until `raise_if_received`, or to the end of the context."""
        self._is_deferred = True
        try:
            yield
        finally:
            self.stop_deferring()
        self.raise_if_received()

    def stop_deferring(self) -> None:
        """Let signals raise at once again: while processes wait for each other, no batch ends."""
        self._is_deferred = False

    def raise_if_received(self) -> None:
        """Raise the exception of a deferred signal.

        Raises:
            Interrupted: if a signal came.
        """
        if self.received is not None:
            raise Interrupted(self.received, self.message)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        at_once = not self._is_deferred or self.received is not None
        self.received = signum
        if at_once:
            self.raise_if_received()
        if signum == signal.SIGINT and is_first_process():
            os.write(2, _STOPPING)  # a handler may not use Python's buffered streams
