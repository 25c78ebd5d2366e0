"""Journal: what a run has finished and where it stands, so that a killed run goes on from there.

It lies in a hidden folder beside the run's place, `.NAME.unfinished`, and goes when the run is
written. Each of its files appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from nope_probe.data import Windows
from nope_probe.errors import UserError
from nope_probe.hooks.capture import ScoreMaps
from nope_probe.hooks.gain import Gains
from nope_probe.hooks.stream import Keeper, State
from nope_probe.interrupts import Interrupts
from nope_probe.processes import Processes
from nope_probe.results import StorageError, unfinished, versions, whole

Kept = tuple[State, dict[str, str]]  # tensors, and notes in words


class Journal:
    """What a run has finished and where it stands; without a place it keeps nothing.

    Args:
        out: where the run will be written.
        settings: what was asked; an unfinished run with other settings is not taken up.
        processes: those that share the run; they all see the same folder.
        every: batches between two states of an unfinished stream.

    Attributes:
        on_kept: called for each stream that need not be run again.

    Example:
        >>> from nope_probe.data import Windows
        >>> zeros = Windows(inputs=torch.zeros(2, 3, dtype=torch.long), name="zeros")
        >>> with Journal() as journal:
        ...     journal.windows("inputs", lambda: zeros).name
        'zeros'
    """

    def __init__(
        self,
        out: Path | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        processes: Processes | None = None,
        every: int = 32,
    ) -> None:
        self.folder = None if out is None else unfinished(out)
        self.settings, self.every = dict(settings or {}), every
        self.processes = processes or Processes()
        self.interrupts = Interrupts()
        self.finished: set[str] = set()
        self.on_kept: Callable[[], object] | None = None
        self._lock: FileLock | None = None
        # Folders above the journal's that were not there, innermost first.
        self._made: list[Path] = []

    def __enter__(self) -> Journal:
        self.interrupts.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.interrupts.__exit__()
        mistaken = kind is not None and issubclass(kind, UserError)
        if self._lock is not None and mistaken and kind is not StorageError:
            self.discard()
            for folder in self._made:
                with suppress(OSError):  # somebody else has put something there since
                    folder.rmdir()
        elif self._lock is not None:
            self._lock.release()

    def begin(self, weights: str) -> None:
        """Take up what an earlier process left, or start.

        Args:
            weights: what tells the model's weights from others.

        Raises:
            UserError: if another process is at work there, or what is there is of another run.
        """
        if self.folder is None:
            return
        if self.processes.is_first:
            about = {"settings": self.settings, "versions": versions(), "weights": weights}
            self._claim(self.folder, json.loads(json.dumps(about)))
        kept = sorted(path.stem for path in self.folder.glob(f"*{_ENDING}"))
        self.finished = set(self.processes.agree(kept))
        self.interrupts.message = "what was done is kept; the same command goes on from there"

    def _claim(self, folder: Path, about: dict[str, Any]) -> None:
        lock = FileLock(folder / "lock")
        try:
            self._made = [parent for parent in folder.parents if not parent.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            if not (folder / "about.json").is_file():
                with whole(folder / "about.json") as partial:
                    partial.write_text(json.dumps(about, indent=2) + "\n")
            _refuse_another(folder, about)
        except Timeout as error:
            raise UserError(f"another process is at work on the run in {folder}") from error
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}") from error
        self._lock = lock

    def discard(self) -> None:
        """Remove the folder: the run is written, or cannot be."""
        if self._lock is not None and self.folder is not None:
            self._lock.release()
            shutil.rmtree(self.folder, ignore_errors=True)

    def maps(self, key: str, capture: Callable[[Keeper], ScoreMaps]) -> ScoreMaps:
        """Capture score maps, or read those that were kept (from disk, as they are needed)."""
        self._tell_if_kept(key)
        state, _ = self._once(key, lambda keeper: (_tensors_of(capture(keeper)), {}))
        return ScoreMaps(**state)

    def gains(self, key: str, measure: Callable[[Keeper], Gains]) -> Gains:
        """Measure gains, or read those that were kept."""
        self._tell_if_kept(key)

        def compute(keeper: Keeper) -> Kept:
            measured = measure(keeper).c.items()
            return {name: torch.tensor(c, dtype=torch.float64) for name, c in measured}, {}

        state, _ = self._once(key, compute)
        return Gains(c={name: tuple(c.tolist()) for name, c in state.items()})  # type: ignore[misc]

    def windows(self, key: str, cut: Callable[[], Windows]) -> Windows:
        """Cut windows in the first process, or read those that were kept."""

        def compute(keeper: Keeper) -> Kept:
            windows = self.processes.agree(cut() if self.processes.is_first else None)
            return {"inputs": windows.inputs}, {"name": windows.name, "bos": str(windows.bos)}

        state, notes = self._once(key, compute)
        return Windows(inputs=state["inputs"], name=notes["name"], bos=notes["bos"] == "True")

    def _tell_if_kept(self, key: str) -> None:
        if self.on_kept is not None and _name(key) in self.finished:
            self.on_kept()

    def _once(self, key: str, compute: Callable[[Keeper], Kept]) -> Kept:
        clerk = _Clerk(self, key)
        if self.folder is None:
            return compute(clerk)
        path = self.folder / (_name(key) + _ENDING)
        if _name(key) not in self.finished:
            try:
                tensors, notes = compute(clerk)
            finally:
                self.interrupts.patient = False
            if self.processes.is_first:
                keep(path, tensors, notes)
            self.processes.wait()
            self.finished.add(_name(key))
            clerk.clear()
        return read(path)


class _Clerk(Keeper):
    """Keeps the state of one stream of a journal, in one process."""

    def __init__(self, journal: Journal, key: str) -> None:
        self.journal, self.interrupts = journal, journal.interrupts
        self.rank, self.n_processes = journal.processes.rank, journal.processes.count
        self.notes = {"stream": key, "processes": str(self.n_processes)}
        self.batches = 0

    @property
    def path(self) -> Path | None:
        folder = self.journal.folder
        return None if folder is None else folder / f"state-{self.rank}.partial"

    def restore(self) -> State:
        self.interrupts.patient = True
        if self.path is None or not self.path.is_file():
            return {}
        state, notes = read(self.path)
        return state if notes == self.notes else {}

    def wants_to_stop(self) -> bool:
        return self.interrupts.asked is not None

    def keep(self, state: Callable[[], State], *, finished: bool) -> None:
        self.batches += not finished
        # Before a long wait for the others, in which no signal is heard, the share is kept whole.
        due = self.n_processes > 1 if finished else self.batches % self.journal.every == 0
        if self.path is not None and (due or self.wants_to_stop()):
            keep(self.path, state(), self.notes)
        self.interrupts.stop()

    def add_up(self, totals: Sequence[Tensor]) -> None:
        self.interrupts.patient = False
        self.journal.processes.add_up(totals)

    def halve(self, batch_size: int) -> None:
        tqdm.write(
            f"a batch does not fit into memory: going on with {batch_size} at a time",
            file=sys.stderr,
        )

    def clear(self) -> None:
        """Remove the state: the stream is finished."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


_ENDING = ".safetensors"


def _name(key: str) -> str:
    return key.replace("/", ",")


def _tensors_of(maps: ScoreMaps) -> State:
    values = {field.name: getattr(maps, field.name) for field in fields(maps)}
    return {name: value for name, value in values.items() if value is not None}


def _refuse_another(folder: Path, about: dict[str, Any]) -> None:
    found = json.loads((folder / "about.json").read_text())
    other = [name for name, value in about.items() if found.get(name) != value]
    if other:
        raise UserError(
            f"{folder} holds an unfinished run with other {' and '.join(other)}; "
            "remove it, or choose another --out"
        )


def keep(path: Path, tensors: State, notes: dict[str, str]) -> None:
    """Write tensors so that the file is there whole or not at all.

    Raises:
        StorageError: if it cannot be written.
    """
    try:
        with whole(path) as partial:
            save_file(
                {k: t.cpu().contiguous() for k, t in tensors.items()}, partial, metadata=notes
            )
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def read(path: Path) -> Kept:
    """Read tensors, from disk as they are needed, and notes.

    Raises:
        StorageError: if it is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise StorageError(f"{path} is broken ({error}); remove it and run again") from error
