"""The `trace` command's run: from settings to a folder, and from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nope_probe.errors import UserError
from nope_probe.experiments.engine import Engine, validate_first_sequence
from nope_probe.experiments.given import Model, run_of, takes
from nope_probe.experiments.trace.analyse import TraceTables, analyse, trace_of
from nope_probe.experiments.trace.sections import lead
from nope_probe.experiments.trace.settings import Settings
from nope_probe.hooks.layers.model import Given
from nope_probe.runtime.folder import Run
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Call, Session


def run(settings: Settings, call: Call | None = None) -> Path:
    """Trace position unless the run is finished, and return the run's folder.

    Args:
        settings: the command's settings.
        call: the further arguments of a call from Python.

    Raises:
        UserError: for settings that the model or the data cannot satisfy.
    """
    with Session("trace", settings, call) as session:
        if not session.finished:
            trace = capture(session)
            if session.is_first:
                with status("writing", in_logs=True):
                    session.write(analyse(session, trace, settings.reader))
    return session.folder


def capture(session: Session[Settings]) -> TraceTables:
    """Return the trace: sums from the checkpoint, or captured and saved, and effects.

    Raises:
        UserError: for a model that cannot be traced, or a non-finite score.
    """
    settings, data = session.settings, session.sequences()
    engine, model, keys = Engine.of(session), session.loaded.model, ["positions"]
    layers = settings.layers_of(session.loaded.info)
    if "positions" not in session.checkpoint:
        validate_first_sequence(model, data.inputs, layers)
    session.announce(1, keys, n_seqs=len(data))
    try:
        with session.checkpoint.progress(keys, session.n_own_seqs):
            sums = engine.positions(
                "positions",
                layers=layers,
                writers=settings.writers,
                per_head=settings.traces_heads,
            )
        with status("splitting the patterns", in_logs=True):
            trace = trace_of(sums)
        with session.checkpoint.progress([]):
            return trace.with_effects(engine, sums, settings.confirm, settings.reader)
    except NotImplementedError as error:
        raise UserError(f"{session.loaded.info.name} cannot be traced: {error}") from error


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace(Run):
    """The writers of the position that each layer (or head) of a model reads.

    Its `maps` are the patterns of the terms by name, such as `L1/rotation`, in nats; where only
    some queries have rows, also the `query_positions` of the rows.
    """

    kind = "trace"

    def __repr__(self) -> str:
        """Return the readers, and the main writers of the strongest pattern."""
        readers = ", ".join(f"L{layer}" for layer in self.terms["layer"].unique())
        _, _, held = super().__repr__().partition(": ")
        return f"Trace of {readers}: {lead(self).sentence} {held}"

    @property
    def terms(self) -> pd.DataFrame:
        """Per reader and term of its pattern: RMS in nats, share, and relative share of it."""
        return self.tables["terms"]

    @property
    def writers(self) -> pd.DataFrame:
        """Per reader, side (key or query) and writer: its share of the pattern."""
        return self.tables["writers"]

    @property
    def effects(self) -> pd.DataFrame:
        """The share that is lost without the strongest writers' position; empty if not measured."""
        return self.tables["effects"]

    @property
    def clocks(self) -> pd.DataFrame:
        """A reader's mean keys and queries along their two principal axes, by position."""
        return self.tables["clocks"]


@takes(Settings)
def run_trace(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Any,
) -> Trace:
    """Find who writes the position that each layer reads, as the `trace` command does.

    Args:
        model: a name, as the command takes it; the result of `load`; a HookedTransformer or a
            TransformerBridge. A loaded model is traced in all its layers by default.
            Inside `ablated`, the ablated model is traced, with `confirm=0`.
        inputs: any inputs of `capture_scores`; vectors for a parameter-free model. By default the
            sequences that the options describe (`data`, `n_seqs`, `seq_len`, ...).
        out: a folder for the run, as the command writes it; the same call reads it again. By
            default nothing is kept.
        options: the command's flags, as below; a single value or a list may stand for a tuple.

    Raises:
        UserError: for too few sequences or folds, or for a family whose residual stream is no sum,
            whose RoPE turns no pairs, or whose projections are no linear maps between norms.

    Example:
        >>> from nope_probe import load, run_trace, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=24)
        >>> trace = run_trace(loaded, data, confirm=0)
        >>> of_pattern = trace.writers.query("layer == 2 and of == 'pattern'")
        >>> shares = of_pattern.groupby("writer")["share"].sum()
        >>> sorted(shares[shares > 0.5].index)
        ['L1H0', 'L1H1']
    """
    return run_of(Trace, run, Settings, model, inputs, out, options)
