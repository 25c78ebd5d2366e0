"""Processes: the copies of a command that torchrun starts, which share one run among them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nope_probe.command import process_count
from nope_probe.errors import UserError

# One process may stream a data set, or load from a slow disk, while all others wait for it.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """One process among those that share a run; alone by default.

    Attributes:
        rank: its number, from 0.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def add_up(self, totals: Sequence[Tensor]) -> None:
        """Replace totals by their sums over all processes, in one all-reduce."""
        if self.count == 1:
            return
        together = torch.cat([total.flatten().to(_device()) for total in totals])
        dist.all_reduce(together)
        sums = together.split([total.numel() for total in totals])
        for total, each in zip(totals, sums, strict=True):
            total.copy_(each.view_as(total))

    def agree(self, value: Any) -> Any:
        """Give all processes the first one's value."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=_device())
        return values[0]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the other processes of a torchrun, if there are any, for as long as the context lasts.

    They talk through NCCL on GPUs and through Gloo elsewhere. Several runs that follow one another
    need a context around them all: the processes that left cannot join again.
    """
    count = process_count()
    if count == 1:
        yield Processes()
        return
    if dist.is_initialized():
        yield Processes(rank=dist.get_rank(), count=count)
        return
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Processes(rank=dist.get_rank(), count=count)
    finally:
        dist.destroy_process_group()


def own_device(device: str) -> str:
    """Choose a device: `auto` is a GPU if there is one; under torchrun each process has its own.

    Raises:
        UserError: if it is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"no device {device!r} on this machine") from error
    return device


def _device() -> torch.device:
    """Give the device through which the processes talk."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
