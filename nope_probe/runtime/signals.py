"""SIGINT and SIGTERM end a run at once or, during a stream, after the batch in progress."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from nope_probe.errors import UserError
from nope_probe.runtime.distributed import is_first_process
from nope_probe.runtime.failure import PeerEndedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STDERR = 2
_STOPPING = b"\nstopping after this batch; press Ctrl-C again to stop now\n"


class Interrupted(KeyboardInterrupt):
    """Raised where a signal ends a run; its text says whether progress was saved.

    Attributes:
        signum: the signal's number; a process that it ends exits with 128 more.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class Signals:
    """Turns signals into `Interrupted` for as long as the context lasts.

    A signal raises at once. Inside `deferred` the first one sets `received`, and
    `raise_if_received` ends the run between two batches; a second one raises at once.

    A process that waits for another one ends by an error when that one does; if a signal came
    first, that error is not shown.

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
            self._before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
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
        """Raise what a deferred signal would have raised.

        Raises:
            Interrupted: if there was one.
        """
        if self.received is not None:
            raise Interrupted(self.received, self.message)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        at_once = not self._is_deferred or self.received is not None
        self.received = signum
        if at_once:
            self.raise_if_received()
        if signum == signal.SIGINT and is_first_process():
            os.write(STDERR, _STOPPING)  # a handler may not use Python's buffered streams
