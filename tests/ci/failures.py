"""Processes that fail in their second batch or step of training, and a disk that is full."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from nope_probe import UserError
from nope_probe.hooks.reading import streaming


def fail_in_second_batch(failure: str) -> None:
    """Let this process fail in its second batch or step of training, for good.

    It gets a signal, makes a `mistake`, or finds a full `disk`. A process that is `slow` takes a
    second for each batch instead.
    """
    for owner, name in ((streaming, "run_batch"), (Trainer, "training_step")):
        setattr(owner, name, _failing(getattr(owner, name), failure))


def _failing(function: Callable[..., Any], failure: str) -> Callable[..., Any]:
    errors = {"mistake": UserError("a mistake"), "disk": OSError(28, "No space left on device")}
    n_calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if failure == "slow":
            time.sleep(1)
        elif n_calls == 2 and failure in errors:
            raise errors[failure]
        elif n_calls == 2:
            os.kill(os.getpid(), signal.Signals[failure])
        return function(*args, **options)

    return call


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let writes beyond a file's size fail, in Python and in any library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
