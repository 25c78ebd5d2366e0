"""Interrupts: SIGINT and SIGTERM end a run where its sums can be kept, with a message."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised where a signal ends a run; its text says what is kept.

    Attributes:
        signum: the signal's number; a process that it ends exits with 128 more.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class Interrupts:
    """Listens to signals for as long as the context lasts.

    A signal raises `Interrupted` at once, but while `patient` the first only sets `asked`: whoever
    runs can end at the next place where nothing is lost, and then call `stop`.

    Attributes:
        message: what an interruption says.
    """

    def __init__(self) -> None:
        self.message = "nothing was written"
        self.patient = False
        self.asked: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # others hear no signals
            self._before = {each: signal.signal(each, self._hear) for each in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        impatient = not self.patient or self.asked is not None
        self.asked = signum
        if impatient:
            self.stop()

    def stop(self) -> None:
        """End the run on the signal that was heard, if there was one.

        Raises:
            Interrupted: with the message.
        """
        if self.asked is not None:
            raise Interrupted(self.asked, self.message)
