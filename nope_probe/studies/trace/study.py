"""The `trace` command's study: its passes and its run, and the function for Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pandas as pd

from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.positions import PositionSums
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.studies.engine import Engine, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes
from nope_probe.studies.page import with_page
from nope_probe.studies.study import Pass, Results, Study, run_study
from nope_probe.studies.tables import term_table
from nope_probe.studies.trace.analyse import (
    EFFECTS_COLUMNS,
    clock_table,
    map_arrays,
    measure_effects,
    sorted_writers,
)
from nope_probe.studies.trace.page import Traced, report, strongest_reader
from nope_probe.studies.trace.settings import Settings


class TracePosition(Study[Settings]):
    """The writers of the position that each layer or head reads, and what it loses without them."""

    command = "trace"
    function = "run_trace"

    def passes(self) -> Iterator[Pass]:
        """Yield the pass that sums the writers' parts, and those that take positions away."""
        session, engine = self.session, Engine.of(self.session)
        if "positions" not in session.checkpoint:
            layers = self.settings.layers_with_maps(session.loaded.info)
            validate_first_sequence(session.loaded.model, engine.inputs, layers)
        yield Pass(key="positions", engine=engine, read=self._read_positions)
        yield Pass(key="effects", engine=engine, read=self._read_effects, runs=None)

    def _read_positions(self, engine: Engine, key: str, ablation: Ablation | None) -> PositionSums:
        with self._traceable():
            return engine.positions(
                key,
                ablation,
                layers=self.settings.layers_with_maps(self.session.loaded.info),
                writers=self.settings.writers,
                per_head=self.settings.traces_heads,
            )

    def _read_effects(
        self, engine: Engine, key: str, ablation: Ablation | None
    ) -> dict[str, pd.DataFrame]:
        """Return the tables; which positions are taken away follows from those of `positions`."""
        with self._traceable():
            sums: PositionSums = engine.results["positions"]
            terms, writers = term_table(sums), sorted_writers(sums)
            reader, n_heads = self._reader(terms, sums), self.settings.confirm
            effects = pd.DataFrame(columns=EFFECTS_COLUMNS)
            if reader is not None and n_heads:
                effects = measure_effects(engine, sums, writers, reader, n_heads=n_heads)
        return {"terms": terms, "writers": writers, "effects": effects}

    def _reader(self, terms: pd.DataFrame, sums: PositionSums) -> str | None:
        """Return the layer or head of the headline, by default the strongest."""
        return self.settings.reader or strongest_reader(terms, sums.counts.tolist())

    @contextmanager
    def _traceable(self) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            name = self.session.loaded.info.name
            raise UserError(f"{name} cannot be traced: {error}") from error

    def analyse(self, results: Results) -> Run:
        """Return the run of the trace."""
        session, sums, tables = self.session, results["positions"], results["effects"]
        inputs, terms = session.sequences(), tables["terms"]
        kept = self.settings.kept_positions_of(inputs.bos)
        manifest = replace(
            session.manifest_of(inputs),
            layers=tuple(sorted(int(layer) for layer in terms["layer"].unique())),
            results=asdict(Traced(kept_positions=kept, reader=self._reader(terms, sums))),
        )
        run = Run(
            manifest=manifest,
            arrays={"maps": map_arrays(sums), "tokens": input_arrays(inputs)},
            tables={**tables, "clocks": clock_table(sums, tables["writers"])},
        )
        return with_page(session, run, report)


run = partial(run_study, TracePosition)


@takes(TracePosition)
def run_trace(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Any
) -> Run:
    """Find who writes the position that each layer reads, as the `trace` command does.

    Inside `ablated`, the ablated model is traced, with `confirm=0`.

    Raises:
        UserError: for too few sequences or folds, or for a family whose residual stream is no sum,
            whose RoPE turns no pairs, or whose projections are no linear maps between norms.

    Example:
        >>> from nope_probe import load, run_trace, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=24)
        >>> trace = run_trace(loaded, data, confirm=0)
        >>> of_pattern = trace.tables["writers"].query("layer == 2 and of == 'pattern'")
        >>> parts = of_pattern.groupby("writer")["part"].sum()
        >>> sorted(parts[parts > 1].index)
        ['L1H0', 'L1H1']
    """
    return run_of(TracePosition, model, inputs, out, options)
