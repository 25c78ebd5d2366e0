"""What the processes that share a run tell one another when one of them ends before its time.

A process that waits for another one learns of its end from a broken connection, if at all, and not
why. So each one writes its failure into the store at which all have met, and each looks there, in a
thread, for those of the others.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING

from nope_probe.errors import MachineError, UserError, line_of, printable
from nope_probe.runtime.failure import Failure, brief, killed
from nope_probe.runtime.meeting import meet

if TYPE_CHECKING:
    from torch.distributed import Store

EVERY = 0.5  # seconds between two looks
LISTENING = 20  # looks between two at which all processes are listened to
PATIENCE = 3.0  # seconds in which the others look at least once
# A process that waits on a GPU may never learn of a broken connection; it is ended after so long.
GRACE = 20.0
SILENCE = 120.0  # after so long without a sign of life a process has ended
STDERR = 2


class Peers:
    """The other processes of a run, as seen from one of them, for as long as the context lasts.

    Leaving the context by an error tells the others of it. Of an error that this process prints,
    the text names the process, unless it is the first.

    Args:
        store: where all processes have met.
        rank: the number of this process, from 0.
        count: how many there are.

    Attributes:
        failure: the first failure of another process, once this one knows of it.
    """

    def __init__(self, store: Store, rank: int, count: int) -> None:
        import torch.distributed as dist

        # A connection of its own, where torch has them: one that waits is closed to other threads.
        clone = getattr(store, "clone", lambda: store)
        self._store = dist.PrefixStore("peers", clone())
        self.store, self.rank, self.count = store, rank, count
        self.failure: Failure | None = None
        self._shared: UserError | None = None
        self._waiting_since: float | None = None
        self._store_is_lost = False
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last beat of each, and since when
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peers:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
        if error is None or error is self._shared or isinstance(error, SystemExit):
            self._leave()
            return
        if self.failure is None:
            self._tell(error)
        line = line_of(error)
        if self.failure is not None and isinstance(error, Exception):  # which this one comes of
            raise self.failure.error(self.rank) from error
        if line is not None:
            raise self._own(*line) from error

    def share(self, error: UserError) -> UserError:
        """Return an error that is raised in all processes, after noting that they know of it."""
        self._shared = error
        return error

    def raise_if_ended(self) -> None:
        """Raise what ends this process because another one has failed.

        Raises:
            UserError: if one has.
        """
        if self.failure is not None:
            raise self.share(self.failure.error(self.rank))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the other processes within the context.

        Raises:
            UserError: if one of them has ended, in place of the error that torch raises.
        """
        self._waiting_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch has no other for a connection that is closed
            self.failure = self._find_failure()
            if self.failure is None:
                raise
            raise self.share(self.failure.error(self.rank)) from error
        finally:
            self._waiting_since = None

    def _find_failure(self) -> Failure | None:
        """Return the end of another process: told, or seen by its silence; None if all run."""
        before, until = self._beats(), time.monotonic() + PATIENCE
        while self.failure is None and not self._store_is_lost and time.monotonic() < until:
            time.sleep(EVERY / 10)
        if self.failure is not None:
            return self.failure
        after = self._beats()
        silent = [r for r in range(self.count) if r != self.rank and before[r] == after[r]]
        if not silent:
            return None
        return killed(silent[0])

    def _beats(self) -> list[bytes]:
        """Return a number that each process changes at every look, or nothing of each."""
        nothing, ranks = b"", range(self.count)
        if self._store_is_lost:
            return [nothing for _ in ranks]
        try:
            return [self._store.get(f"beat/{r}") if self._has(f"beat/{r}") else b"" for r in ranks]
        except RuntimeError:
            self._store_is_lost = True
            return [nothing for _ in ranks]

    def _watch(self) -> None:
        """Look for failures of others until the context ends."""
        n_looks, seen = 0, 0.0
        while not self._stopped.wait(EVERY):
            if self.failure is None and not self._store_is_lost:
                n_looks, seen = n_looks + 1, time.monotonic()
                self._look(n_looks)
                continue
            since = self._waiting_since
            if since is not None and time.monotonic() - max(since, seen) > GRACE:
                self._end_at_once()

    def _look(self, n_looks: int) -> None:
        try:
            self._store.set(f"beat/{self.rank}", str(n_looks))
            if not self._has("failed"):
                if n_looks % LISTENING == 0:
                    self._listen()
                return
            failure = self._failure_of(int(self._store.get("failed")))
            self._store.set(f"done/{self.rank}", "")
            self.failure = failure
        except RuntimeError:
            self._lose_store()

    def _listen(self) -> None:
        """Find a process that was killed: nothing is heard of it, and it has not left."""
        now = time.monotonic()
        for rank, beat in enumerate(self._beats()):
            before, since = self._heard.get(rank, (b"", now))
            if beat != before or rank == self.rank:
                self._heard[rank] = beat, now
            elif beat and now - since > SILENCE and not self._has(f"done/{rank}"):
                self.failure = killed(rank)
                return

    def _lose_store(self) -> None:
        """Note that the store is gone, and with it the first process, unless torchrun keeps it."""
        self._store_is_lost = True
        if self.rank != 0 and "TORCHELASTIC_RUN_ID" not in os.environ:
            self.failure = killed(0)

    def _end_at_once(self) -> None:
        """End this process, whose main thread waits where no error reaches it."""
        failure = self._find_failure()
        assert failure is not None
        error = failure.error(self.rank)
        if error.prints:
            os.write(STDERR, f"error: {printable(str(error))}\n".encode())
        os._exit(error.exit_code)

    def _own(self, text: str, code: int) -> UserError:
        """Return the error that ends this process for a failure of its own, which it prints."""
        place = f"process {self.rank}: " if self.rank else ""
        own = (MachineError if code == MachineError.exit_code else UserError)(place + text)
        own.prints = True
        return own

    def _tell(self, error: BaseException) -> None:
        """Report an error of this process to the others, and find out whether one failed before.

        Where several fail at once, only the first of them prints why.
        """
        line = line_of(error)
        text, code = line or (brief(error), MachineError.exit_code)
        interrupted = isinstance(error, KeyboardInterrupt)
        # The first process of a machine says that it was interrupted; tracebacks name no process.
        printed = line is not None or (interrupted and os.environ.get("LOCAL_RANK", "0") == "0")
        failure = Failure(rank=self.rank, code=code, text=text, printed=printed)
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.rank}", json.dumps(asdict(failure)))
            self._store.set("failed", str(self.rank))
            lower = range(self.rank)
            self._wait_for([[f"failed/{each}", f"done/{each}"] for each in lower])
            failed = [each for each in lower if self._has(f"failed/{each}")]
            if failed:
                self.failure = self._failure_of(failed[0])
        self._leave()

    def _failure_of(self, rank: int) -> Failure:
        return Failure(**json.loads(self._store.get(f"failed/{rank}")))

    def _leave(self) -> None:
        """Leave the store; the first process, which may keep it for all, does so last."""
        try:
            self._store.set(f"done/{self.rank}", "")
            if self.rank == 0:
                ended = 0 if self.failure is None else self.failure.rank
                others = [each for each in range(1, self.count) if each != ended]
                self._wait_for([[f"done/{each}"] for each in others])
        except RuntimeError:
            self._store_is_lost = True

    def _wait_for(self, keys: list[list[str]]) -> None:
        """Wait until the store has one key of each list, for as long as others take to look."""
        until = time.monotonic() + PATIENCE
        while keys and time.monotonic() < until:
            keys = [each for each in keys if not any(self._has(key) for key in each)]
            if keys:
                time.sleep(EVERY / 10)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE)


@contextmanager
def join_peers(problem: UserError | None = None) -> Iterator[Peers]:
    """Meet the other processes that share a run, and stay in touch as long as the context lasts.

    Args:
        problem: why this process cannot take part.

    Raises:
        UserError: in all processes, for the first that has a problem.
        MachineError: if the others are not there in time.
    """
    with Peers(*meet(problem)) as peers:
        yield peers
