"""The processes that torchrun starts for a command and that share one run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from nope_probe.errors import MachineError, UserError
from nope_probe.runtime.environment import number_of
from nope_probe.runtime.meeting import Told, join_seconds, raise_first, told
from nope_probe.runtime.peers import Peers, join_peers

if TYPE_CHECKING:
    import torch

# All processes wait for the first, which may stream a data set or read from a slow disk.
TIMEOUT = timedelta(days=1)
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_OF_SEVERAL = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # what each of several processes is told
Value = TypeVar("Value")
_joined: ContextVar[Processes | None] = ContextVar("joined", default=None)


def is_first_process() -> bool:
    """Return whether this process is alone, or the first of those that share the run."""
    return os.environ.get("RANK", "0") == "0"


def process_count() -> int:
    """Return how many processes torchrun started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def validate_launch() -> None:
    """Check the variables by which torchrun tells a process which of several it is.

    Raises:
        MachineError: for one that is wrong or missing.
    """
    count = number_of("WORLD_SIZE", 1, 1, 2**31)
    number_of("RANK", 0, 0, count)
    number_of("LOCAL_RANK", 0, 0, count)
    if count == 1:
        return
    missing = [name for name in _OF_SEVERAL if not os.environ.get(name)]
    if missing:
        raise MachineError(
            f"WORLD_SIZE is {count}, and {', '.join(missing)} not set: start several processes "
            "with torchrun, or unset WORLD_SIZE"
        )
    number_of("MASTER_PORT", 0, 1, 2**16)
    join_seconds()


def hide_lost_connections() -> None:
    """Keep torch, once it is loaded, from printing a stack of C++ for each that it loses.

    They are warnings, and the end of a process that they follow is said in one line.
    """
    if process_count() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def validate_one_process() -> None:
    """Check that a command which runs in one process was not started in several.

    Raises:
        UserError: if torchrun started several.
    """
    if process_count() > 1:
        raise UserError(
            "only ablate, behaviour, scores and the figures of language models run in several "
            "processes"
        )


@dataclass(frozen=True, kw_only=True)
class Processes:
    """One process among those that share a run; alone by default.

    Attributes:
        rank: its number, from 0.
        count: how many processes there are.
        peers: the others; None if there are none.
    """

    rank: int = 0
    count: int = 1
    peers: Peers | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def all_reduce(self, totals: Sequence[torch.Tensor]) -> None:
        """Replace totals by their sums over all processes, in one all-reduce."""
        if self.peers is None:
            return
        import torch
        import torch.distributed as dist

        together = torch.cat([total.flatten().to(_device()) for total in totals])
        with self.peers.waiting():
            dist.all_reduce(together)
            if together.is_cuda:
                torch.cuda.current_stream().synchronize()
        sums = together.split([total.numel() for total in totals])
        for total, each in zip(totals, sums, strict=True):
            total.copy_(each.view_as(total))

    def broadcast(self, value: Value) -> Value:
        """Return the first process's value in every process."""
        if self.peers is None:
            return value
        import torch.distributed as dist

        values = [value]
        with self.peers.waiting():
            dist.broadcast_object_list(values, src=0, device=_device())
        return values[0]

    def raise_first(self, problem: UserError | None) -> None:
        """Raise a problem in all processes if there is one in any: the first process's, if several.

        Raises:
            UserError: which says in which process, if not in the first.
        """
        if self.peers is None:
            if problem is not None:
                raise problem
            return
        import torch.distributed as dist

        problems: list[Told] = [None] * self.count
        with self.peers.waiting():
            dist.all_gather_object(problems, told(problem))
        try:
            raise_first(problems, problem)
        except UserError as error:
            raise self.peers.share(error) from error.__cause__

    def barrier(self) -> None:
        """Wait until every process has called this."""
        if self.peers is not None:
            import torch.distributed as dist

            with self.peers.waiting():
                dist.barrier()

    @property
    def one_has_ended(self) -> bool:
        """Whether another process has failed."""
        return self.peers is not None and self.peers.failure is not None

    def raise_if_ended(self) -> None:
        """Raise what ends this process if another one has failed.

        Raises:
            UserError: which says which one.
        """
        if self.peers is not None:
            self.peers.raise_if_ended()


@contextmanager
def process_group(device: str, problem: UserError | None = None) -> Iterator[Processes]:
    """Join the other processes of a torchrun, if there are any, for as long as the context lasts.

    They communicate through NCCL on GPUs and through Gloo elsewhere. A process that has left the
    group cannot join it again: runs that follow one another share a context around them all.

    Args:
        device: of this process.
        problem: why this process cannot take part.

    Raises:
        UserError: in all processes, for the first that has a problem.
        MachineError: if the others are not there in time.
    """
    joined = _joined.get()
    if process_count() == 1 or joined is not None:
        processes = joined or Processes()
        processes.raise_first(problem)
        yield processes
        return
    import torch
    import torch.distributed as dist

    with join_peers(problem) as peers:
        peers.store.set_timeout(TIMEOUT)
        on_gpu = torch.device(device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("group", peers.store),
            rank=peers.rank,
            world_size=peers.count,
            timeout=TIMEOUT,
        )
        processes = Processes(rank=peers.rank, count=peers.count, peers=peers)
        token = _joined.set(processes)
        try:
            yield processes
        finally:
            _joined.reset(token)
            dist.destroy_process_group()


def own_device(device: str) -> str:
    """Return this process's device: `auto` is a GPU where there is one, under torchrun its own.

    Raises:
        UserError: if the machine does not have it.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        usable = torch.empty(1, device=device).device.type in _DEVICES
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"no device {device!r} on this machine") from error
    if not usable:
        raise UserError(f"--device {device} holds no numbers: expected {', '.join(_DEVICES)}")
    return device


def _device() -> torch.device:
    """Return the device through which the processes communicate."""
    import torch
    import torch.distributed as dist

    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
