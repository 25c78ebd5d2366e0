"""The `behaviour` command's study: its passes and its run, and the function for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import log, nan
from typing import Any, TypeVar

import torch

from nope_probe.analyses.behaviour import Losses, by_document, halves, index_targets, ridge
from nope_probe.errors import UserError
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.reading.residuals import capture_distances, capture_moments
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.edited_weights import untrained
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.folds import State
from nope_probe.run.folder import Run
from nope_probe.run.session import Session
from nope_probe.studies.behaviour.analyse import Behaviour, Distances
from nope_probe.studies.behaviour.page import MeasuresTaken, report
from nope_probe.studies.behaviour.probes import DRAWN, Probe, make_probes
from nope_probe.studies.behaviour.settings import MEASURES, Settings, make_conditions
from nope_probe.studies.engine import Engine, irreplaceable, validate_removable
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes
from nope_probe.studies.page import with_page
from nope_probe.studies.study import Pass, Results, Study, calibration, captured, run_study

MIN_DOCUMENTS = 8  # four to fit on and four to evaluate
Name = TypeVar("Name")


class MeasureBehaviour(Study[Settings]):
    """What a model does with context, order, BOS, copies and length, in every condition."""

    command = "behaviour"
    function = "run_behaviour"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded, text = self.settings, session.loaded, session.sequences()
        if text.kind in ("random", "vectors"):
            raise UserError("behaviour is measured on text, with a language model")
        drawn = [name for name in DRAWN if name in settings.measures]
        if loaded.tokenizer is None and drawn and settings.measures != MEASURES:
            raise UserError(
                f"--measures {' '.join(drawn)}: random tokens need a tokenizer, and the model has "
                "none"
            )
        has, kept = components(loaded.model), irreplaceable(loaded.model)
        self.left_out = kept if "weights" in settings.removals else {}
        self.conditions = make_conditions(has, settings.removals, settings.ablations, kept)
        settings.validate_removals(self.conditions)
        validate_removable(loaded.model, [*self.conditions.values()])
        self.layers = settings.layers_with_maps(loaded.info)  # refused before anything is run
        if text.n_documents < MIN_DOCUMENTS:
            raise UserError(
                f"{len(text)} sequences from {text.n_documents} documents: {MIN_DOCUMENTS} "
                "documents are needed; raise --n-seqs, or take other --data"
            )
        self.probes, self.skipped = make_probes(session)
        if not {*settings.measures} - {*self.skipped}:
            reasons = "; ".join(f"{name}: {self.skipped[name]}" for name in settings.measures)
            raise UserError(f"nothing to measure ({reasons})")
        self.engine = Engine.of(session)
        self.skip = settings.skip_keys_of(text.kind)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes of the losses, and of decoded positions."""
        engines = {name: self._on(probe) for name, probe in self.probes.items()}
        yield from calibration(engines["text"], [*self.conditions.values()])
        for probe, engine in engines.items():
            if self._measured_on(engine):
                key = f"positions/{probe}"
                yield Pass(key=key, engine=engine, read=self._read_positions)
        for name in self.conditions:
            for probe, engine in engines.items():
                yield self._losses(name, probe, engine)
        if "position" in self.settings.measures:
            of_sources = [name for name, of in self.conditions.items() if of.condition.are_sources]
            drawn = partial(untrained, seed=self.settings.seed)
            yield from self._decoding("distances", [*self.conditions], nullcontext)
            yield from self._decoding("untrained", of_sources, drawn)

    def _on(self, probe: Probe) -> Engine:
        """Return the engine on a probe, in batches of as many tokens as one of text windows.

        Every process that shares the run gets a batch.
        """
        n_seqs, length = probe.tokens.shape
        same_tokens = self.settings.seqs_per_batch * self.settings.seq_len // length
        return replace(
            self.engine,
            inputs=probe.tokens,
            documents=probe.documents,
            batch_size=max(1, min(same_tokens, n_seqs // self.session.processes.count)),
        )

    def _measured_on(self, engine: Engine) -> list[Ablation]:
        """Return the conditions whose means are measured anew on sequences of another length.

        Written positions belong to one length, mean attention to all shorter ones too.
        """
        n, n_text = engine.inputs.shape[1], self.probes["text"].tokens.shape[1]
        return [
            ablation
            for ablation in self.conditions.values()
            if (ablation.condition.writers and n != n_text)
            or ("content" in ablation.condition and n > n_text)
        ]

    def _read_positions(
        self, engine: Engine, key: str, ablation: Ablation | None
    ) -> Calibration | None:
        return engine.calibrated(key, self._measured_on(engine)).calibration

    def _losses(self, name: str, probe: str, engine: Engine) -> Pass:
        """Return the pass that reads the losses of a condition on a probe."""
        ablation = self.conditions[name]
        if "mask" in ablation.condition:
            ablation = replace(ablation, prefix=self.probes[probe].prefix)

        def read(engine: Engine, key: str, ablation: Ablation | None) -> Losses:
            if self.conditions[name] in self._measured_on(engine):
                measured = self._read_positions(engine, f"positions/{probe}", None)
                assert engine.calibration is not None
                assert measured is not None
                measured = replace(
                    engine.calibration, positions=measured.positions, patterns=measured.patterns
                )
                engine = replace(engine, calibration=measured)
            return by_document(engine.losses(key, ablation), self.probes[probe].documents)

        kind, key = f"loss of {engine.inputs.shape[1]} tokens", f"loss/{name}/{probe}"
        return Pass(key=key, engine=engine, read=read, ablation=ablation, kind=kind)

    def _decoding(
        self,
        weights: str,
        names: Sequence[str],
        inside: Callable[[HookedModel], AbstractContextManager[object]],
    ) -> Iterator[Pass]:
        """Yield two passes for each condition: one fits the index, and one reads it elsewhere.

        Half of the documents are fitted, and the distances of true and fitted index are those of
        the other half.
        """
        text = self.probes["text"]
        fit, held_out = (self._on(text.subset(half)) for half in halves(text.documents))
        for name in names:
            key, ablation = f"{weights}/{name}", self.conditions[name]
            fitted = Pass(
                key=f"{key}/fit",
                engine=fit,
                read=partial(captured, self._regress),
                ablation=ablation,
                inside=inside,
                kind="fit",
            )
            yield fitted
            yield replace(
                fitted,
                key=f"{key}/distance",
                engine=held_out,
                read=partial(self._distances, fitted),
                kind="distance",
            )

    def _regress(self, engine: Engine, stream: StreamCheckpoint | None) -> State:
        generator = torch.Generator().manual_seed(self.settings.seed)
        n_seqs, seq_len = engine.inputs.shape
        xx, xy = capture_moments(
            engine.model,
            engine.inputs,
            index_targets(n_seqs, seq_len, self.skip, generator),
            n_layers=len(self.layers),
            skip=self.skip,
            batch_size=engine.batch_size,
            checkpoint=stream,
        )
        return {"weights": ridge(xx, xy)}

    def _distances(
        self, fitted: Pass, engine: Engine, key: str, ablation: Ablation | None
    ) -> Distances:
        """Return the distances of a fit, by document; the fit's pass came before."""
        fit = replace(fitted.engine, calibration=engine.calibration)
        weights = fitted.read(fit, fitted.key, ablation)["weights"]

        def read(engine: Engine, stream: StreamCheckpoint | None) -> State:
            distances = capture_distances(
                engine.model,
                engine.inputs,
                weights,
                skip=self.skip,
                batch_size=engine.batch_size,
                checkpoint=stream,
            )
            return {"distances": distances}

        documents = engine.documents
        assert documents is not None
        return by_document(captured(read, engine, key, ablation)["distances"], documents)

    def _measured(self, results: Results) -> Behaviour:
        """Return the measurements of every condition."""
        settings, loaded = self.settings, self.session.loaded

        def of(keys: Mapping[Name, str]) -> dict[Name, Any]:
            return {name: results[key] for name, key in keys.items() if key in results}

        places = product(self.conditions, self.probes)
        uniform, tokenizer = nan, loaded.tokenizer
        if tokenizer is not None:
            uniform = log(len(tokenizer) - len(set(tokenizer.all_special_ids)))
        return Behaviour(
            conditions=self.conditions,
            measures=settings.measures,
            skipped=self.skipped,
            probes=self.probes,
            segment=self.session.sequences().segment,
            trained=settings.trained_len_of(loaded.info.n_ctx),
            uniform=uniform,
            layers=self.layers,
            skip_keys=self.skip,
            losses=of({(name, probe): f"loss/{name}/{probe}" for name, probe in places}),
            distances=of({name: f"distances/{name}/distance" for name in self.conditions}),
            untrained=of({name: f"untrained/{name}/distance" for name in self.conditions}),
        )

    def analyse(self, results: Results) -> Run:
        """Estimate every measure in every condition, and return the run.

        Raises:
            UserError: for a loss that is not finite.
        """
        session, text, behaviour = self.session, self.probes["text"], self._measured(results)
        for (condition, probe), losses in behaviour.losses.items():
            if not losses.isfinite().all():
                raise UserError(f"non-finite losses in condition {condition} ({probe})")
        taken = MeasuresTaken(
            measures=self.settings.measures,
            skipped=self.skipped,
            prefix=text.prefix,
            trained_len=behaviour.trained,
            bin_width=behaviour.bin_width,
        )
        manifest = replace(
            session.manifest_of(session.sequences()),
            conditions=tuple(self.conditions),
            left_out=self.left_out,
            results=asdict(taken),
        )
        tokens = {name: probe.tokens for name, probe in self.probes.items() if name != "text"}
        tokens |= {"tokens": text.tokens, "documents": text.documents}
        if "long" in self.probes:
            tokens["long_documents"] = self.probes["long"].documents
        arrays = {"tokens": {name: array.numpy() for name, array in tokens.items()}}
        run = Run(manifest=manifest, arrays=arrays, tables=behaviour.tables())
        return with_page(session, run, report)


run = partial(run_study, MeasureBehaviour)


@takes(MeasureBehaviour)
def run_behaviour(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Any
) -> Run:
    """Measure a model's behaviour as the `behaviour` command does, and return its tables.

    Inputs are text, and the sequences of one text are one document only where `sequences` cut them.
    Extrapolation needs longer sequences, so a call with inputs leaves it out.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_behaviour
        >>> small = dict(n_seqs=16, seq_len=24, measures=["loss"], remove=["mlp"])
        >>> run = run_behaviour("nope-tiny", **small)
        >>> table = run.tables["behaviour"].set_index(["measure", "condition"])
        >>> bool(table.loc[("loss", "mlp"), "difference_low"] > 1)
        True
    """
    return run_of(MeasureBehaviour, model, inputs, out, options)
