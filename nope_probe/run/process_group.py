"""The processes of a torchrun that share a run: how they connect, add up totals, and wait.

torchrun watches the processes that it starts. When one of them fails, torchrun sends SIGTERM to the
others, which save their progress, and prints the error that the first one recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, Store
from torch.distributed.rendezvous import rendezvous

from nope_probe.errors import MachineError, UserError
from nope_probe.hooks.reading.streaming import batches_of
from nope_probe.run.processes import HEAD_START, PeerEndedError, Signals, process_count

# In which all processes have to start; torch may look for the first one for twice as long.
JOIN_TIMEOUT = timedelta(minutes=5)
# The longest wait for the first process, which may stream a data set or write a large run.
TIMEOUT = timedelta(hours=3)
Value = TypeVar("Value")


def connect() -> tuple[Store, int, int]:
    """Return the store that all processes share, this process's rank, and their number.

    Raises:
        MachineError: if torchrun did not set this process's address and rank, the store does not
            answer, or the other processes do not connect.
    """
    try:
        with Signals.end_at_once():
            return next(rendezvous("env://", timeout=JOIN_TIMEOUT))
    except (DistError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")[:200]
        raise MachineError(
            f"{process_count()} processes did not connect within {JOIN_TIMEOUT.seconds} s "
            f"({reason}): start all of them with torchrun, or unset WORLD_SIZE"
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
        batches = batches_of(n_seqs, batch_size, self.rank, self.count)
        return sum(stop - start for start, stop in batches)

    def all_reduce(self, totals: Sequence[torch.Tensor]) -> None:
        """Replace totals by their sums over all processes.

        Raises:
            PeerEndedError: if another process has ended.
        """
        if self.count == 1:
            return
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
            with _waiting():
                dist.barrier()


def _device() -> torch.device:
    """Return the device through which the processes communicate."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextmanager
def _waiting() -> Iterator[None]:
    try:
        with Signals.end_at_once():
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
    if dist.is_initialized():
        yield Processes(rank=dist.get_rank(), count=dist.get_world_size())
        return
    store, rank, count = connect()
    store.set_timeout(TIMEOUT)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    with _waiting():
        dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=count)
    try:
        yield Processes(rank=rank, count=count)
    finally:
        dist.destroy_process_group()


def device_of_process(device: str) -> str:
    """Return this process's device: `auto` is a GPU if there is one, under torchrun one each.

    Raises:
        UserError: if the machine does not have it, or it holds no numbers.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"no device {device!r} on this machine") from error
    return device


@contextmanager
def out_of_memory_is_a_user_error() -> Iterator[None]:
    """Turn an out-of-memory error that smaller batches did not cure into one line."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_cpu = "can't allocate memory" in str(error)  # where torch raises a RuntimeError
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not on_cpu:
            raise
        raise UserError(
            "a single sequence, or the model, does not fit into the memory of the device; lower "
            "--seq-len or --layers, or take --device-map auto"
        ) from error
