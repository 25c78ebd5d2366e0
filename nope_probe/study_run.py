"""A study under way: its model, its journal, and the processes that share it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nope_probe.data import Windows
from nope_probe.errors import UserError
from nope_probe.hooks.stream import shares
from nope_probe.journal import Journal
from nope_probe.models import Loaded
from nope_probe.processes import Processes, joined, own_device
from nope_probe.provenance import fingerprint
from nope_probe.results import Run, write_run
from nope_probe.study import StudySettings, cut_windows, load_model


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """What a study has at hand while it computes.

    Attributes:
        settings: what was asked, the device being this process's own.
        asked: the same as a run records it.
        loaded: the model.
        journal: what is finished already, and keeps what will be; its processes share the work.
        started: when, in seconds since the epoch.
    """

    settings: StudySettings
    asked: dict[str, Any]
    loaded: Loaded
    journal: Journal
    started: float = field(default_factory=time.time)

    @property
    def processes(self) -> Processes:
        """Those that share the work, and which of them this is."""
        return self.journal.processes

    @property
    def share(self) -> int:
        """How many of the windows are this process's."""
        seqs, size = self.settings.n_seqs, self.settings.batch_size
        ours = shares(seqs, size, self.processes.rank, self.processes.count)
        return sum(stop - start for start, stop in ours)

    def windows(self, key: str, *, shuffle: bool | None = None) -> Windows:
        """Cut windows, or read those that were cut before."""
        return self.journal.windows(
            key, lambda: cut_windows(self.settings, self.loaded, shuffle=shuffle)
        )

    @contextmanager
    def progress(self, passes: int) -> Iterator[tqdm]:
        """Show a bar for some passes over this process's share, in the first process alone."""
        with tqdm(
            total=passes * self.share,
            unit="seq",
            file=sys.stderr,
            dynamic_ncols=True,
            disable=not self.processes.is_first,
        ) as bar:
            self.journal.on_kept = lambda: bar.update(self.share)
            yield bar


def run_study(
    out: Path,
    asked: dict[str, Any],
    settings: StudySettings,
    compute: Callable[[StudyRun], Run | None],
) -> None:
    """Compute a study in this process and those beside it, and write its run.

    Args:
        out: where the run is written.
        asked: what was asked, as the run records it.
        settings: what was asked.
        compute: from what is at hand to the run; nothing but in the first process.

    Raises:
        UserError: for what cannot be done.
        Interrupted: on a signal, once what was done is kept.
    """
    settings = replace(settings, device=own_device(settings.device))
    with joined(settings.device) as processes:
        _refuse_idle(settings, processes)
        journal = Journal(out, settings=asked, processes=processes, every=settings.checkpoint_every)
        with _enough_memory(settings), journal:
            loaded = load_model(settings)
            journal.begin(fingerprint(loaded.model))
            run = compute(
                StudyRun(
                    settings=settings,
                    asked=asked,
                    loaded=loaded,
                    journal=journal,
                )
            )
            if run is not None:
                write_run(out, run, journal.folder / "run" if journal.folder else None)
        journal.discard()
        processes.wait()


@contextmanager
def _enough_memory(settings: StudySettings) -> Iterator[None]:
    """Say in one line that memory ended; outside the journal, which stays: others may have it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a single window of {settings.seq_len} tokens, or the model, does not fit into the "
            "memory of the device; lower --seq-len or --layers, or take --device-map auto"
        ) from error


def _refuse_idle(settings: StudySettings, processes: Processes) -> None:
    n_batches = -(-settings.n_seqs // settings.batch_size)
    if n_batches < processes.count:
        raise UserError(
            f"{settings.n_seqs} windows in batches of {settings.batch_size} are {n_batches} "
            f"batches, too few for {processes.count} processes; lower --batch-size"
        )
