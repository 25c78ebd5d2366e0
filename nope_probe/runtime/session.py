"""One run of a command, from its settings to its folder: what every command shares.

A session finds the run's folder, validates before anything is computed, resumes what an earlier
process left, joins the processes that share the run, turns signals into a saved state, and loads
the model. What a command computes stands in its own `run(settings)`, straight down.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from nope_probe.errors import UserError
from nope_probe.runtime.distributed import Processes, own_device, process_group
from nope_probe.runtime.folder import (
    Run,
    check_output_dir,
    checkpoint_dir,
    settings_hash,
    write_run,
)
from nope_probe.runtime.signals import Signals

if TYPE_CHECKING:
    from tqdm import tqdm

    from nope_probe.data.sequences import Sequences
    from nope_probe.models.load import LoadedModel
    from nope_probe.runtime.checkpoint import RunCheckpoint
    from nope_probe.runtime.settings import RunSettings


@runtime_checkable
class SessionSettings(Protocol):
    """What a session asks of a command's settings."""

    @property
    def out(self) -> Path | None:
        """The folder of the run, if the user named one."""

    @property
    def device(self) -> str:
        """The torch device, or `auto`."""

    @property
    def checkpoint_every(self) -> int:
        """Batches between two saved states."""

    @property
    def subject(self) -> str:
        """What the default folder is named after."""

    def validate(self) -> None:
        """Check what can be checked without the model."""

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a run's manifest holds and that tell it from other runs."""

    def load_model(self, device: str) -> LoadedModel:
        """Load the model that the run is about."""


Settings_co = TypeVar("Settings_co", covariant=True, bound=SessionSettings)


class Session(Generic[Settings_co]):
    """A run in progress, or one that is finished already.

    Args:
        command: the command's name.
        settings: what the user asked for.

    Attributes:
        folder: the run's folder.
        finished: whether it holds the finished run; then there is no model to run.
        recorded: the settings as the manifest holds them.
        loaded: the model.
        checkpoint: the finished parts of the run, and its stream in progress.
        started: when, in seconds since the epoch.

    Raises:
        UserError: on entering, for settings or a place that cannot be; on leaving, if the device
            ran out of memory.
        Interrupted: on a signal; progress is saved.
    """

    loaded: LoadedModel
    checkpoint: RunCheckpoint

    def __init__(self, command: str, settings: Settings_co) -> None:
        self._settings, self.recorded = settings, settings.recorded()
        self.folder = settings.out or default_output_dir(command, settings.subject, self.recorded)
        self.finished, self.started = False, time.time()
        self.processes = Processes()
        self._exits = ExitStack()

    @property
    def settings(self) -> Settings_co:
        """What the user asked for."""
        return self._settings

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.processes.is_first

    def __enter__(self) -> Session[Settings_co]:
        self.settings.validate()
        self.finished = check_output_dir(self.folder, self.recorded)
        if self.finished:
            # A process may have been killed after it wrote the run and before it cleaned up.
            shutil.rmtree(checkpoint_dir(self.folder), ignore_errors=True)
            return self
        with ExitStack() as stack:
            self._start(stack)
            self._exits = stack.pop_all()
        return self

    def _start(self, stack: ExitStack) -> None:
        """Join the processes, load the model and open the checkpoint."""
        signals = stack.enter_context(Signals())
        device = own_device(self.settings.device)
        self.processes = stack.enter_context(process_group(device))
        from nope_probe.runtime.checkpoint import RunCheckpoint
        from nope_probe.runtime.provenance import fingerprint, versions

        stack.enter_context(_one_line_for_memory())
        self.loaded = self.settings.load_model(device)
        about = {
            "settings": self.recorded,
            "versions": versions(),
            "weights": fingerprint(self.loaded.model),
        }
        self.checkpoint = stack.enter_context(
            RunCheckpoint(
                checkpoint_dir(self.folder),
                about=about,
                processes=self.processes,
                signals=signals,
                every=self.settings.checkpoint_every,
            )
        )

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.processes.barrier()
        self._exits.__exit__(*error)

    def sequences(
        self: Session[RunSettings], key: str = "inputs", *, shuffle: bool | None = None
    ) -> Sequences:
        """Return the run's sequences: made once, in the first process, and then read.

        Args:
            key: under which they are saved.
            shuffle: whether to permute tokens; as in the settings by default.
        """
        from nope_probe.data.sequences import Sequences

        if key not in self.checkpoint:
            made = None
            if self.is_first:
                made = self.settings.make_sequences(self.loaded, shuffle=shuffle)
            made = self.processes.broadcast(made)
            assert made is not None
            notes = {"name": made.name, "bos": str(made.bos)}
            self.checkpoint.save(key, {"inputs": made.inputs}, notes)
        notes = self.checkpoint.notes(key)
        inputs = self.checkpoint.load(key)["inputs"]
        return Sequences(inputs=inputs, name=notes["name"], bos=notes["bos"] == "True")

    @contextmanager
    def progress(self, keys: Sequence[str], n_seqs: int, unit: str = "seq") -> Iterator[tqdm]:
        """Show how many sequences of all streams are done, in the first process alone.

        Args:
            keys: the streams of the run, each of which runs all sequences.
            n_seqs: how many sequences this process runs in each.
            unit: what is counted.
        """
        from tqdm import tqdm

        done = [key for key in keys if key in self.checkpoint]
        with tqdm(
            total=n_seqs * len(keys),
            initial=n_seqs * len(done),
            unit=unit,
            file=sys.stderr,
            dynamic_ncols=True,
            disable=not self.is_first,
        ) as bar:
            self.checkpoint.bar = bar
            yield bar

    @property
    def n_own_seqs(self: Session[RunSettings]) -> int:
        """How many of the sequences this process runs."""
        from nope_probe.hooks.streaming import batches_of

        settings, processes = self.settings, self.processes
        ours = batches_of(settings.n_seqs, settings.batch_size, processes.rank, processes.count)
        return sum(stop - start for start, stop in ours)

    def write(self, run: Run) -> None:
        """Write the finished run, and remove the checkpoint."""
        assert self.checkpoint.folder is not None
        write_run(self.folder, run, self.checkpoint.folder / "run")
        self.checkpoint.discard()


@contextmanager
def _one_line_for_memory() -> Iterator[None]:
    """Turn the end of the device's memory into one line; what was saved can be resumed."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "a single sequence, or the model, does not fit into the memory of the device; lower "
            "--seq-len or --layers, or take --device-map auto"
        ) from error


def default_output_dir(command: str, subject: str, recorded: dict[str, Any]) -> Path:
    """Return the folder named after a run's command, its subject and the hash of its settings."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(subject).name or subject).strip("-")
    parts = [command, *([name] if name else []), settings_hash(recorded)]
    return Path("runs") / "-".join(parts)
