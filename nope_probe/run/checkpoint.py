"""The finished parts of a run, which a resumed run reads, and its stream in progress.

The parts stay in a hidden folder next to the run's, `.NAME.unfinished`, which is removed when
the run is written. A file in it is complete or absent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from nope_probe.errors import MachineError, StorageError, UserError
from nope_probe.files import (
    JsonObject,
    atomic_write,
    json_checksum,
    read_json,
    remove,
    write_json,
    writing,
)
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.maps.folds import State
from nope_probe.maps.maps import Layers
from nope_probe.run.process_group import Processes
from nope_probe.run.processes import LOCK, Signals, progress

_ABOUT = "about.json"  # which run a folder holds
_WITH_ESTIMATE = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}, {remaining} left"
ITEM = 4  # bytes of a float32
Write = Callable[[str, Sequence[int], np.ndarray], None]


class RunCheckpoint(Stream):
    """The finished parts of a run by key, and its stream in progress.

    Args:
        folder: where they are saved, which this process holds.
        about: the run's identity; an unfinished run of another identity is not resumed.
        processes: the processes that share the run and its folder.
        signals: how signals end a stream.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, RunCheckpoint(Path(folder)) as checkpoint:
        ...     checkpoint.save("inputs", {"tokens": torch.zeros(2, 3)})
        ...     "inputs" in checkpoint, checkpoint.load("inputs")["tokens"].shape
        (True, torch.Size([2, 3]))
    """

    def __init__(
        self,
        folder: Path,
        about: JsonObject | None = None,
        processes: Processes | None = None,
        signals: Signals | None = None,
    ) -> None:
        self.folder, self.about = folder, about or {}
        self.processes, self.signals = processes or Processes(), signals or Signals()
        self.rank, self.n_processes = self.processes.rank, self.processes.count
        self.bar, self.streams = tqdm(disable=True), dict[str, int]()  # by key, how many sequences
        self._end = 0  # of the stream in progress, on the bar
        self._finished = set[str]()

    def __enter__(self) -> RunCheckpoint:
        """Find an earlier process's parts.

        Raises:
            UserError: in the first process, if the folder belongs to another run.
        """
        finished = set[str]()
        if self.processes.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._validate_same_run(self.folder / _ABOUT)
            finished = {path.name for path in self.folder.glob("*.safetensors")}
        self._finished = self.processes.broadcast(finished)
        self.signals.message = "progress was saved; run the same command to resume"
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After a user's mistake there is nothing to resume: the command has to be changed.
        if kind and issubclass(kind, UserError) and not issubclass(kind, MachineError):
            self.discard()

    def _validate_same_run(self, path: Path) -> None:
        """Check the settings, versions, weights and data of the run in a folder, or write them.

        Raises:
            UserError: naming what differs.
            StorageError: if the file cannot be written, or is broken.
        """
        if not path.is_file():
            with writing(f"to {path.parent}"):
                write_json(path, self.about)
        try:
            before = read_json(path)
            other = [
                k for k, v in self.about.items() if json_checksum(before.get(k)) != json_checksum(v)
            ]
        except (OSError, ValueError, AttributeError) as error:
            raise StorageError(f"{path} is broken; remove {path.parent} and run again") from error
        if other:
            raise UserError(
                f"{path.parent} holds an unfinished run with other {' and '.join(other)}; "
                "remove it, or choose another --out"
            )

    def discard(self) -> None:
        """Remove the parts: the run is written, or cannot be."""
        if self.processes.is_first:
            for path in [path for path in self.folder.iterdir() if path.name != LOCK]:
                remove(path)

    def __contains__(self, key: str) -> bool:
        return self._path(key).name in self._finished

    def save(self, key: str, tensors: State) -> None:
        """Save a finished part of the run, in the first process: all of it, or nothing."""
        path = self._path(key)
        if self.processes.is_first:
            contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            with writing(str(path)), atomic_write(path) as partial:
                save_file(contiguous, partial)
        self.processes.barrier()
        self._finished.add(path.name)

    def load(self, key: str) -> State:
        """Return the tensors of a finished part, which are memory-mapped.

        Raises:
            StorageError: if the file is broken.
        """
        path = self._path(key)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path} is broken ({error}); remove it and run again") from error

    @contextmanager
    def progress(self, sizes: Mapping[str, int]) -> Iterator[None]:
        """Show on stderr how many sequences of all streams are done, in the first process.

        It names the stream in progress, and estimates the time that is left.

        Args:
            sizes: by stream, how many sequences this process runs; 0 if that is not known.
        """
        done = sum(size for key, size in sizes.items() if key in self)
        self.streams, total = dict(sizes), sum(sizes.values())
        with progress(
            total=total,
            initial=done,
            unit="seq",
            dynamic_ncols=True,
            bar_format=_WITH_ESTIMATE if total else "{desc}{elapsed}",
        ) as self.bar:
            yield

    @contextmanager
    def stream(self, key: str) -> Iterator[Stream]:
        """Count a stream's batches on the progress bar; a signal ends it between batches.

        What a finished stream did not count, such as a text that is one batch, is counted then.
        """
        place, n_streams = "", len(self.streams)
        if n_streams > 1 and key in self.streams:
            place = f" ({[*self.streams].index(key) + 1} of {n_streams})"
        self.bar.set_description(f"{key}{place}", refresh=sys.stderr.isatty())
        self._end = self.bar.n + self.streams.get(key, 0)
        with self.signals.deferred():
            yield self
            self._count(self._end)

    def advance(self, n_seqs: int) -> None:
        """Show that sequences are done; a signal that came ends the stream."""
        self._count(n_seqs)
        self.signals.raise_if_received()

    def _count(self, n_seqs: int) -> None:
        """Show that sequences of the stream are done, and never more than it has."""
        self.bar.update(min(n_seqs, self._end - self.bar.n))

    def all_reduce(self, totals: Sequence[Tensor]) -> None:
        """Replace totals by their sums over the processes; while they wait, a signal raises."""
        self.signals.is_deferred = False  # while processes wait for each other, no batch ends
        self.processes.all_reduce(totals)

    def batch_halved(self, batch_size: int) -> None:
        """Write above the progress bar that a batch did not fit into memory."""
        said = f"a batch does not fit into memory: going on with {batch_size} at a time"
        tqdm.write(said, file=sys.stderr)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key.replace('/', ',')}.safetensors"


@contextmanager
def tensor_writer(path: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[Write]:
    """Yield a function that writes blocks into a safetensors file of float32 tensors.

    The functions of safetensors need all tensors in memory at once. The function yielded takes a
    tensor's name, the index of the block's first cell (indices that are left out are 0) and a block
    whose cells follow each other in the tensor. Cells not written are 0. Where writing fails,
    the file is removed: a full disk gets its room back.

    Args:
        path: the file.
        shapes: the shape of each tensor by its name.

    Raises:
        StorageError: if the file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.numpy import load_file
        >>> with TemporaryDirectory() as folder:
        ...     with tensor_writer(Path(folder, "maps.safetensors"), {"score": (2, 3)}) as write:
        ...         write("score", (1, 1), np.ones(2, np.float32))
        ...     load_file(Path(folder, "maps.safetensors"))["score"].tolist()
        [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    """
    fields, end = dict[str, JsonObject](), 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + ITEM * prod(shape)
        fields[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def write(name: str, where: Sequence[int], block: Float32[np.ndarray, "*block"]) -> None:
        shape, (begin, _) = shapes[name], fields[name]["data_offsets"]
        first = sum(at * prod(shape[axis + 1 :]) for axis, at in enumerate(where))
        file.seek(8 + len(header) + begin + ITEM * first)
        file.write(np.ascontiguousarray(block, "<f4").data)

    with writing(str(path)), atomic_write(path) as partial, partial.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
        yield write


def write_folds(path: Path, maps: Mapping[str, Layers]) -> None:
    """Write packed fold maps by name as lower triangles [fold, layer, cell], in float32.

    Raises:
        StorageError: if the file cannot be written.
    """
    first, *_ = (layer for layers in maps.values() for layer in layers.values())
    n_folds, n_cells = first.folds.n_folds, int((first.queries + 1).sum())
    shapes = {name: (n_folds, len(layers), n_cells) for name, layers in maps.items()}
    with tensor_writer(path, shapes) as write:
        for name, layers in maps.items():
            for place, layer in enumerate(layers.values()):
                for fold in range(n_folds):
                    write(name, (fold, place), layer.folds.folds[fold].float().numpy())
