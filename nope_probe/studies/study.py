"""A study: what a command measures, as a list of passes, and the run that their results make."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeAlias, TypeVar

import pandas as pd
from rich.filesize import decimal

from nope_probe.hooks.reading.streaming import Stream
from nope_probe.hooks.reading.written import BYTES
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.hooks.removing.weights import Calibration
from nope_probe.hooks.removing.written import WrittenPositions
from nope_probe.maps.folds import State
from nope_probe.models.info import LoadedModel
from nope_probe.run.flags import CommandSettings
from nope_probe.run.folder import Run
from nope_probe.run.process_group import Processes
from nope_probe.run.processes import print_line, validate_memory, validate_one_process
from nope_probe.run.session import SIZES, Session, load_model
from nope_probe.studies.engine import NOTHING, Capture, Engine, position_key

Chosen = TypeVar("Chosen", bound=CommandSettings)
PASSES_SAVED = "all passes were saved; the same command goes on with their analysis"
CALIBRATION = "calibration"  # the pass whose result calibrates the engines of all passes after it
TIMED = 0.1  # of all tokens: the share of a kind of passes that --dry-run times
Results: TypeAlias = Mapping[str, Any]  # by the pass's key; passes read different things


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Sequences through a model once.

    Attributes:
        key: its name in the checkpoint, on the progress bar, and among the results.
        engine: the model on the sequences that are run.
        read: captures what the pass is for, given the engine, the key and the ablation. The engine
            has the `results` of the passes before it by key; none where `--dry-run` times a batch.
        ablation: what the model is run without.
        maps: how many maps (of float64, in every fold) are in memory while it is read.
        runs: how often it runs the engine's sequences; None where the results before it decide.
        kind: passes of a kind take the same time for each sequence; by default, a kind is one pass.
        reads_logits: whether a batch's logits are in memory.
    """

    key: str
    engine: Engine
    read: Callable[[Engine, str, Ablation], Any]
    ablation: Ablation = NOTHING
    maps: int = 0
    runs: int | None = 1
    kind: str | None = None
    reads_logits: bool = False

    @property
    def positions(self) -> list[str]:
        """The keys of what is measured in the ablated model first: written positions."""
        key = position_key(self.ablation, self.engine)
        return [key] if key else []

    @property
    def n_written(self) -> int:
        """On how many tokens written position is measured."""
        texts = self.engine.inputs if self.engine.texts is None else self.engine.texts.inputs
        return texts.shape[0] * texts.shape[1] if self.ablation.condition.of_written else 0

    def sizes(self, processes: Processes) -> dict[str, int]:
        """Return how many sequences this process runs for each key.

        The positions of removed writers, which are measured in the ablated model, come first.
        """
        n_local = 0
        if self.runs is not None:
            n_local = self.runs * processes.n_own(len(self.engine.inputs), self.engine.batch_size)
        return dict.fromkeys((*self.positions, self.key), n_local)


def calibration(
    engine: Engine, ablations: Sequence[Ablation], key: str = CALIBRATION
) -> Iterator[Pass]:
    """Yield the pass that measures gains and means for those after it, if an ablation needs them.

    Args:
        engine: the model on the sequences that they are measured on.
        ablations: what is removed in the passes after it.
        key: of the pass; the result of another than the default's calibrates no pass by itself.
    """

    def read(engine: Engine, key: str, ablation: Ablation) -> Calibration | None:
        return engine.calibrated(key, ablations).calibration

    if any(ablation.needs_intact for ablation in ablations):
        yield Pass(key=key, engine=engine, read=read)


def captured(capture: Capture, engine: Engine, key: str, ablation: Ablation) -> State:
    """Return the tensors of a capture; `partial(captured, capture)` reads a pass."""
    return engine.load_or_compute(key, capture, ablation)


class Study(ABC, Generic[Chosen]):
    """What a command measures: `class Ablate(Study[Settings])` names the class of its settings.

    Args:
        session: the run in progress: settings, model and sequences.

    Raises:
        UserError: for what the model or the data cannot satisfy.
    """

    def __init__(self, session: Session[Chosen]) -> None:
        self.session, self.settings = session, session.settings

    @classmethod
    def run(cls, settings: Chosen, *, dry: bool = False) -> Path:
        """Carry out the study unless its run is finished, and return the run's folder.

        Args:
            settings: the command's.
            dry: whether to print the passes and how long they take instead; nothing is kept.

        Raises:
            UserError: for what cannot be done.
        """
        if not dry:
            return cls.carry_out(Session(settings, cls.load))
        validate_one_process()
        with TemporaryDirectory(prefix="nope-probe-") as place:
            elsewhere = type(settings)(**{**vars(settings), "out": Path(place, "run")})
            with Session(elsewhere, cls.load).opened() as session:
                sys.stdout.write(forecast(session, [*cls(session).passes()]))
            return session.folder

    @classmethod
    def carry_out(cls, session: Session[Chosen]) -> Path:
        """Carry out the study in a session unless its run is finished, and return its folder.

        Raises:
            UserError: for what cannot be done.
        """
        with session.opened():
            if not session.finished:
                study = cls(session)
                passes = [*study.passes()]
                with session.checkpoint.progress(announce(session, passes)):
                    results = run_passes(passes)
                if session.is_kept:
                    session.checkpoint.signals.message = PASSES_SAVED
                if session.processes.is_first:
                    session.write(study.analyse(results))
        return session.folder

    @staticmethod
    def load(settings: Chosen, device: str) -> LoadedModel | None:
        """Load the model; by default the first layers that the settings name."""
        return load_model(settings, device)

    @abstractmethod
    def passes(self) -> Iterator[Pass]:
        """Yield all passes, in the order in which they are run."""

    def massive_outputs(self) -> dict[str, int]:
        """Return by measurement how many outputs stay out of the means of written position."""
        of_blocks = (pass_ for pass_ in self.passes() if pass_.ablation.condition.of_blocks)
        keys = {key for pass_ in of_blocks for key in pass_.positions}
        load = self.session.checkpoint.load
        return {key: WrittenPositions.from_tensors(load(key)).n_left_out for key in sorted(keys)}

    @abstractmethod
    def analyse(self, results: Results) -> Run:
        """Return the run that the results of the passes make, by key."""


def announce(session: Session[Chosen], passes: Sequence[Pass]) -> dict[str, int]:
    """Print how many passes are run and their memory, and return their sequences by key.

    Raises:
        UserError: for maps and a batch that are larger than the memory that is free.
    """
    sizes = {key: n for pass_ in passes for key, n in pass_.sizes(session.processes).items()}
    memory = memory_in_words(session, passes)
    n_done = sum(key in session.checkpoint for key in sizes)
    done = f", {n_done:,} of them done before" if n_done else ""
    print_line(f"running {len(sizes):,} {'pass' if len(sizes) == 1 else 'passes'}{done}; {memory}")
    return sizes


def run_passes(passes: Iterable[Pass]) -> Results:
    """Run passes in turn, and return their results by key."""
    results = dict[str, Any]()
    for pass_ in passes:
        calibrated = results.get(CALIBRATION)
        engine = replace(pass_.engine, calibration=calibrated, results=results)
        results[pass_.key] = pass_.read(engine, pass_.key, pass_.ablation)
    return results


def forecast(session: Session[Chosen], passes: Sequence[Pass]) -> str:
    """Return a table of passes: what each removes, how many tokens it runs, and how long it takes.

    One batch is timed of each kind of pass that runs a good part of all tokens; other passes are
    taken to be as fast as the largest kind.

    Args:
        session: the run, which has not begun.
        passes: all of them.
    """
    loading, memory = time.monotonic() - session.started, memory_in_words(session, passes)
    rows = dict[str, tuple[str, str, str, int]]()  # passes share measured positions
    for pass_ in passes:
        ablation, n_pos = pass_.ablation, pass_.engine.inputs.shape[1]
        for key, n in pass_.sizes(session.processes).items():
            # A block is run to its attention's output, and then to its end.
            n_runs = 2 if ablation.condition.of_blocks and key != pass_.key else 1
            rows[key] = pass_.kind or pass_.key, key, ablation.named.name, n_runs * n * n_pos
    table = pd.DataFrame(rows.values(), columns=["kind", "pass", "removed", "tokens"])
    sizes = table.groupby("kind")["tokens"].sum().sort_values(ascending=False)
    first = {pass_.kind or pass_.key: pass_ for pass_ in reversed(passes)}
    timed = {
        kind: seconds_per_token(first[str(kind)])
        for kind, size in sizes.items()
        if size and size >= TIMED * sizes.sum()
    }
    largest = next(iter(timed.values()), 0.0)
    table["seconds"] = table["tokens"] * table.pop("kind").map(timed).fillna(largest)
    unknown = ", ".join(table["pass"][table["seconds"] == 0])
    after = f"; how long {unknown} takes is not known before" if unknown else ""
    return (
        f"{table.to_string(index=False, float_format='{:.1f}'.format)}\n"
        f"about {table['seconds'].sum():,.0f} s for {len(rows)} passes, which begin after "
        f"{loading:.0f} s{after}; {memory}\n"
    )


class BatchDone(Exception):  # noqa: N818  (it ends a timed pass, it is no error)
    """Raised after the first batch of a pass that is timed; it has so many sequences."""


class FirstBatch(Stream):
    """Ends a stream after its first batch."""

    def advance(self, n_seqs: int) -> None:
        """Raise `BatchDone`."""
        raise BatchDone(n_seqs)


def seconds_per_token(pass_: Pass) -> float:
    """Return how long the first batch of a pass takes for a token; all of one without batches."""
    engine, ablation = replace(pass_.engine, checkpoint=None, stream=FirstBatch()), pass_.ablation
    if ablation.needs_calibration:  # which is not measured yet
        ablation = NOTHING
    start, n_seqs = time.monotonic(), len(engine.inputs) * (pass_.runs or 1)
    try:
        pass_.read(engine, pass_.key, ablation)
    except BatchDone as end:
        (n_seqs,) = end.args
    return (time.monotonic() - start) / (n_seqs * engine.inputs.shape[1])


def memory_in_words(session: Session[Chosen], passes: Sequence[Pass]) -> str:
    """Return in words how much memory a study takes above its model.

    Raises:
        UserError: for maps and a batch that are larger than the memory that is free.
    """
    n_maps, info = max(pass_.maps for pass_ in passes), session.loaded.info
    measured_on = max(pass_.n_written for pass_ in passes)
    d_vocab = info.d_vocab if any(pass_.reads_logits for pass_ in passes) else 0
    n_bytes = session.settings.memory(n_maps, info.d_model, info.n_heads, d_vocab)
    n_bytes += BYTES * measured_on * info.d_model
    validate_memory(n_bytes, SIZES)
    return f"about {decimal(n_bytes)} of memory above the model"
