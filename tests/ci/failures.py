"""Processes that fail in their second batch or step of training, and a disk that is full."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import Trainer

from nope_probe.errors import UserError
from nope_probe.hooks.reading import streaming


def fail_in_second_batch(failure: str) -> None:
    """Let this process fail in one of these ways, for good.

    Args:
        failure: `memory`, `mistake`, `disk`, `bug`, `SIGKILL`, `SIGTERM`; `slow` takes a second
            for each batch instead.
    """
    for owner, name in ((streaming, "run_batch"), (Trainer, "training_step")):
        setattr(owner, name, _failing(getattr(owner, name), failure))


def _failing(function: Callable, failure: str) -> Callable:
    n_calls = 0

    def call(*args: object, **options: object) -> object:
        nonlocal n_calls
        n_calls += 1
        if failure == "slow":
            time.sleep(1)
        elif n_calls == 2:
            _fail(failure)
        return function(*args, **options)

    return call


def _fail(failure: str) -> None:
    if failure.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[failure])
        return
    errors = {
        "memory": torch.OutOfMemoryError("CUDA out of memory"),
        "mistake": UserError("a mistake"),
        "disk": OSError(28, "No space left on device", "state"),
        "bug": RuntimeError("a bug"),
    }
    raise errors[failure]


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let writes beyond a file's size fail, in Python and in any library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
