"""The finished parts of a run, and the state of its stream in progress: what a resumed run reads.

They are saved in a hidden folder beside the run's folder, `.NAME.unfinished`, which is removed when
the run is written. A file in it is complete or absent, and its checksum, which
covers its name and the run, is checked before it is used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from nope_probe.errors import StorageError, UserError
from nope_probe.files import read_json
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.folds import State
from nope_probe.maps.stored_maps import Stored
from nope_probe.runtime.folder import atomic_write, reason
from nope_probe.runtime.identity import json_checksum
from nope_probe.runtime.lock import FolderLock
from nope_probe.runtime.processes import PeerEndedError, Processes, Signals
from nope_probe.runtime.tensors import open_tensors, read_notes, read_tensors, write_tensors
from nope_probe.runtime.terminal import open_bar, phase_of

_ENDING = ".safetensors"
_ABOUT = "about.json"  # which run a folder holds
_DONE = "done"  # the note that says how many sequences of a stream are in its saved state


class RunCheckpoint:
    """The finished parts of a run by key, and the state of its stream in progress.

    Args:
        folder: where they are saved; None keeps finished parts in memory.
        about: what identifies the run; an unfinished run about anything else is not resumed.
        processes: the processes that share the run and its folder.
        signals: how signals end a stream.
        every: batches between two saved states of a stream.
        lock: the lock on the folder, if it is held already.

    Example:
        >>> with RunCheckpoint() as checkpoint:
        ...     checkpoint.save("inputs", {"tokens": torch.zeros(2, 3)})
        ...     "inputs" in checkpoint, checkpoint.load("inputs")["tokens"].shape
        (True, torch.Size([2, 3]))
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        about: Mapping[str, Any] | None = None,
        processes: Processes | None = None,
        signals: Signals | None = None,
        every: int = 32,
        lock: FolderLock | None = None,
    ) -> None:
        self.folder, self.about, self.every = folder, json.loads(json.dumps(about or {})), every
        self.owner = json_checksum(self.about)
        self.processes, self.signals = processes or Processes(), signals or Signals()
        self.bar: tqdm | None = None
        self._streams: list[str] = []
        self._finished: set[str] = set()
        self._checked: set[str] = set()
        self._in_memory: dict[str, tuple[State, dict[str, str]]] = {}
        self._lock = lock

    def __enter__(self) -> RunCheckpoint:
        """Lock the folder, and find what an earlier process finished.

        Raises:
            UserError: in the first process, if another one is using it or it belongs to another
                run.
        """
        if self.folder is not None:
            finished = []
            if self.processes.is_first:
                self._lock = self._claim(self.folder)
                finished = sorted(path.stem for path in self.folder.glob(f"*{_ENDING}"))
            self._finished = set(self.processes.broadcast(finished))
            self.signals.message = "progress was saved; run the same command to resume"
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if not self.processes.is_first or self._lock is None:
            return
        if kind and self._is_of_no_use_after(kind):
            self.discard()
        self._lock.__exit__(kind, None, None)

    def _is_of_no_use_after(self, kind: type[BaseException]) -> bool:
        """Return whether an error leaves nothing to resume from: the command has to be changed.

        After an error of the code what was computed is kept, and inputs alone are not.
        """
        if issubclass(kind, UserError) and not issubclass(kind, PeerEndedError):
            return not issubclass(kind, StorageError)
        computed = any("inputs" not in name for name in self._finished)
        has_state = self.state_path is not None and self.state_path.exists()
        return issubclass(kind, Exception) and not (computed or has_state)

    def _claim(self, folder: Path) -> FolderLock:
        """Lock the folder for this run, and write down in it which run it is."""
        with ExitStack() as stack:
            lock = stack.enter_context(self._lock or FolderLock(folder))
            self._validate_same_run(folder / _ABOUT)
            stack.pop_all()
        return lock

    def _validate_same_run(self, path: Path) -> None:
        """Check the settings, versions, weights and data of the run in a folder, or write them.

        Raises:
            UserError: naming what differs.
            StorageError: if the file cannot be written, or is broken.
        """
        try:
            if not path.is_file():
                with atomic_write(path) as partial:
                    partial.write_text(json.dumps(self.about, indent=2) + "\n", encoding="utf-8")
            before = read_json(path)
            other = [name for name, value in self.about.items() if before.get(name) != value]
        except OSError as error:
            raise StorageError(f"cannot write to {path.parent}: {reason(error)}") from error
        except (ValueError, AttributeError) as error:
            raise StorageError(f"{path} is broken; remove {path.parent} and run again") from error
        if other:
            raise UserError(
                f"{path.parent} holds an unfinished run with other {' and '.join(other)}; "
                "remove it, or choose another --out"
            )

    def discard(self) -> None:
        """Remove what was kept: the run is written, or cannot be."""
        if self._lock is not None:
            self._lock.clear()

    def __contains__(self, key: str) -> bool:
        return _name(key) in self._finished

    def save(self, key: str, tensors: State, notes: Mapping[str, str] | None = None) -> None:
        """Save a finished part of the run, in the first process."""
        if self.folder is None:
            self._in_memory[key] = tensors, dict(notes or {})
        elif self.processes.is_first:
            write_tensors(self._path(key), tensors, notes or {}, owner=self.owner)
            self._checked.add(key)
        self.processes.barrier()
        self._finished.add(_name(key))
        if (state := self.state_path) is not None:
            state.unlink(missing_ok=True)

    def load(self, key: str) -> State:
        """Return the tensors of a finished part; from disk they are memory-mapped.

        Raises:
            StorageError: if the file is not the one that this run wrote for this part.
        """
        return self._read(key)[0]

    def open(self, key: str) -> Mapping[str, Stored]:
        """Return the tensors of a finished part, which are read from disk as they are asked for.

        Its checksum is checked unless this process has written or checked it.

        Raises:
            StorageError: if the file is not the one that this run wrote for this part.
        """
        if self.folder is None:
            return self._in_memory[key][0]
        if key not in self._checked:
            self.load(key)
            self._checked.add(key)
        return open_tensors(self._path(key))

    def once(self, key: str, compute: Callable[[StreamCheckpoint], State]) -> State:
        """Return the tensors of a part of the run, computed and saved unless that is finished.

        Args:
            key: the part's name in the run.
            compute: given the part's stream, which it resumes and saves its progress in, returns
                the part's tensors.
        """
        self.finish(key, compute)
        return self.load(key)

    def finish(self, key: str, compute: Callable[[StreamCheckpoint], State]) -> None:
        """Compute and save a part of the run unless it is finished, as `once` does."""
        if key not in self:
            with self.stream(key) as stream:
                tensors = compute(stream)
            self.save(key, tensors)

    def scratch(self, name: str) -> Path:
        """Return where a file of this name can be written, which goes with the checkpoint."""
        assert self.folder is not None
        return self.folder / f"{name}.partial"

    def notes(self, key: str) -> dict[str, str]:
        """Return the notes of a finished part."""
        return self._read(key)[1]

    def _read(self, key: str) -> tuple[State, dict[str, str]]:
        if self.folder is None:
            return self._in_memory[key]
        return read_tensors(self._path(key), owner=self.owner)

    @contextmanager
    def progress(
        self, keys: Sequence[str] | Mapping[str, int], n_seqs: int = 0, unit: str = "seq"
    ) -> Iterator[None]:
        """Show on stderr how many sequences of all streams are done, in the first process.

        It names the stream in progress, and estimates the time that is left.

        Args:
            keys: the streams of the run, or the number of sequences that this process runs in each.
            n_seqs: where keys alone are given, this number for all; 0 if that is not known.
            unit: what is counted.
        """
        sizes = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, n_seqs)
        done = sum(
            size if key in self else _SavedStream(self, key).n_saved for key, size in sizes.items()
        )
        self._streams = list(sizes)
        hidden = not self.processes.is_first
        with open_bar(sum(sizes.values()), done, unit, hidden=hidden) as self.bar:
            yield
        self.bar = None

    @contextmanager
    def stream(self, key: str) -> Iterator[StreamCheckpoint]:
        """Save the state of one stream every so many batches; a signal ends it between two."""
        if self.bar is not None:
            self.bar.set_description(f"{phase_of(key)}{self._place(key)}")
        with self.signals.deferred():
            yield _SavedStream(self, key)

    def _place(self, key: str) -> str:
        """Return which of the run's streams this is, where there are several."""
        if len(self._streams) < 2 or key not in self._streams:
            return ""
        return f" ({self._streams.index(key) + 1} of {len(self._streams)})"

    @property
    def state_path(self) -> Path | None:
        """The file that holds the state of this process's stream in progress."""
        return None if self.folder is None else self.folder / f"state-{self.processes.rank}.partial"

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / (_name(key) + _ENDING)


class _SavedStream(StreamCheckpoint):
    """The state of one stream of a run, in one process."""

    def __init__(self, run: RunCheckpoint, key: str) -> None:
        self.run, self.n_batches = run, 0
        self.n_done = self.n_counted = 0
        self.rank, self.n_processes = run.processes.rank, run.processes.count
        self.notes = {"stream": key, "processes": str(self.n_processes)}

    @property
    def n_saved(self) -> int:
        """How many sequences of this stream an earlier process saved, less its last batch."""
        notes = self._saved_notes()
        return 0 if notes is None else int(notes.get(_DONE, 0))

    def _saved_notes(self) -> dict[str, str] | None:
        """Return the notes of the saved state, if it is one of this stream."""
        path = self.run.state_path
        if path is None or not path.is_file():
            return None
        notes = read_notes(path)
        return notes if self._is_ours(notes) else None

    def _is_ours(self, notes: Mapping[str, str]) -> bool:
        return {name: value for name, value in notes.items() if name != _DONE} == self.notes

    def restore(self) -> State:
        path = self.run.state_path
        if path is None or not path.is_file():
            return {}
        state, notes = read_tensors(path, owner=self.run.owner)
        if not self._is_ours(notes):
            return {}
        self.n_counted = int(notes.get(_DONE, 0))  # the bar began with them
        return state

    def is_due(self) -> bool:
        self.n_batches += 1
        return self.run.signals.received is not None or self.n_batches % self.run.every == 0

    def save(self, state: State) -> None:
        if self.run.state_path is not None:
            notes = {**self.notes, _DONE: str(self.n_done)}
            write_tensors(self.run.state_path, state, notes, owner=self.run.owner)

    def advance(self, n_seqs: int) -> None:
        counted = min(self.n_counted, n_seqs)
        self.n_counted -= counted
        self.n_done += n_seqs
        if self.run.bar is not None:
            self.run.bar.update(n_seqs - counted)
        self.run.signals.raise_if_received()

    def all_reduce(self, totals: Sequence[Tensor]) -> None:
        self.run.signals.stop_deferring()
        self.run.processes.all_reduce(totals)

    def batch_halved(self, batch_size: int) -> None:
        tqdm.write(
            f"a batch does not fit into memory: going on with {batch_size} at a time",
            file=sys.stderr,
        )


def _name(key: str) -> str:
    """Return a key as a file name."""
    return key.replace("/", ",")
