"""Processes that fail in their second batch, and a disk that is full."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nope_probe import UserError
from nope_probe.hooks.reading import streaming


def fail_in_second_batch(failure: str) -> None:
    """Let this process get a signal in its second batch, or make a `mistake` there, for good.

    A process that is `slow` takes a second for each batch instead.
    """
    run, n_calls = streaming.run_batch, 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if failure == "slow":
            time.sleep(1)
        elif n_calls == 2 and failure == "mistake":
            raise UserError("a mistake")
        elif n_calls == 2:
            os.kill(os.getpid(), signal.Signals[failure])
        return run(*args, **options)

    streaming.run_batch = call


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let writes beyond a file's size fail, in Python and in any library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
