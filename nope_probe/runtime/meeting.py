"""How the processes that share a run find one another, before they form a group.

They meet at the address that torchrun puts into their environment. Where nobody answers, torch
would wait for as long as for any other message: here a minute.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

from nope_probe.errors import MachineError, UserError, stderr_held
from nope_probe.runtime.environment import number_of

if TYPE_CHECKING:
    from torch.distributed import Store

JOIN_SECONDS = "NOPE_PROBE_JOIN_SECONDS"
_GRACE = 5  # seconds in which torch notices by itself that the time is up
Told: TypeAlias = tuple[int, str] | None  # exit code and text of a problem


def join_seconds() -> int:
    """Return how long a process waits for the others.

    Raises:
        MachineError: if the environment variable is no such number.
    """
    return number_of(JOIN_SECONDS, 60, 1, 86_401)


def meet(problem: UserError | None) -> tuple[Store, int, int]:
    """Return the store that all processes share, the rank of this one and how many there are.

    Args:
        problem: why this process cannot take part.

    Raises:
        UserError: in all processes, for the first that has a problem.
        MachineError: if the others are not there in time.
    """
    import torch.distributed as dist

    found: list[tuple[Store, int, int]] = []
    try:
        with stderr_held(MachineError, dist.DistError):
            _find(found)
            store, rank, count = found[0]
            store.set(f"problem/{rank}", json.dumps(told(problem)))
            problems = [json.loads(store.get(f"problem/{each}")) for each in range(count)]
    except dist.DistError as error:
        raise _nobody(str(error)) from error
    if any(problems):
        _leave(store, rank, count)
    raise_first(problems, problem)
    return store, rank, count


def _find(found: list[tuple[Store, int, int]]) -> None:
    """Append the store, in a thread of its own: a server that is mute blocks torch for ever."""
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    errors: list[Exception] = []

    def find() -> None:
        try:
            found.append(next(rendezvous("env://", timeout=timedelta(seconds=join_seconds()))))
        except (DistError, ValueError, OSError) as error:
            errors.append(error)

    thread = Thread(target=find, daemon=True)
    thread.start()
    thread.join(join_seconds() + _GRACE)
    if not found:
        raise _nobody(str(errors[0]) if errors else "it does not answer")


def _nobody(reason: str) -> MachineError:
    count, name, port = (os.environ[n] for n in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    short = reason.splitlines()[0].rstrip(".")[:200]
    return MachineError(
        f"{count} processes did not meet at {name}:{port} within {join_seconds()} s ({short}): "
        f"start all of them with torchrun, unset WORLD_SIZE, or set {JOIN_SECONDS}"
    )


def _leave(store: Store, rank: int, count: int) -> None:
    """Wait until every process has read the problems: the first may keep the store for all."""
    from torch.distributed import DistError

    store.set(f"read/{rank}", "")
    if rank == 0:
        with suppress(DistError):
            store.wait([f"read/{each}" for each in range(count)])


def told(problem: UserError | None) -> Told:
    """Return a problem as processes tell it to one another."""
    return None if problem is None else (problem.exit_code, str(problem))


def raise_first(problems: list[Told], own: UserError | None) -> None:
    """Raise the first of the problems of all processes.

    Args:
        problems: by rank.
        own: this process's.

    Raises:
        UserError: which says in which process, if not in the first.
    """
    for rank, each in enumerate(problems):
        if each is None:
            continue
        code, text = each
        if own is not None and str(own) == text:
            raise own
        kind = MachineError if code == MachineError.exit_code else UserError
        raise kind(text if rank == 0 else f"process {rank}: {text}")
