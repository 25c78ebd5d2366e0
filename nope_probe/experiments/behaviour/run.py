"""The `behaviour` command's run: from settings to a folder, in every condition, and from Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nope_probe.analyses.behaviour import by_document, halves, index_targets, ridge
from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.analyses.jackknife import Interval
from nope_probe.experiments.behaviour.analyse import analyse
from nope_probe.experiments.behaviour.plan import (
    Distances,
    Losses,
    MeasuredBehaviour,
    Plan,
    Probe,
    head_name,
    make_plan,
)
from nope_probe.experiments.behaviour.settings import Settings
from nope_probe.experiments.engine import Engine, position_keys
from nope_probe.experiments.given import Model, run_of, takes
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.reading.residuals import capture_distances, capture_moments
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.edited_weights import untrained
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.folds import State
from nope_probe.maps.layers import shared_patterns
from nope_probe.runtime.folder import Run
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Call, Session

HEAD_PROBES = ("text", "copy_text")  # on which single heads are removed


def run(settings: Settings, call: Call | None = None) -> Path:
    """Measure the model's behaviour unless that is finished, and return the run's folder.

    Args:
        settings: the command's.
        call: the model and sequences of a Python call.

    Raises:
        UserError: for what cannot be done.
    """
    with Session("behaviour", settings, call) as session:
        if not session.finished:
            plan = make_plan(session)
            measured = capture(session, plan)
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    session.write(analyse(session, plan, measured))
    return session.folder


def capture(session: Session[Settings], plan: Plan) -> MeasuredBehaviour:
    """Return all measurements, from the checkpoint or captured and saved.

    Args:
        session: the run.
        plan: its plan.
    """
    runner = _Runner(session, plan)
    sizes = runner.sizes()
    session.announce(len(plan.conditions) + len(plan.heads), [*sizes])
    with session.checkpoint.progress(sizes):
        return runner.run()


class _Runner:
    """The conditions of a plan, each with the captures that its measures need."""

    def __init__(self, session: Session[Settings], plan: Plan) -> None:
        self.settings, self.plan, self.processes = session.settings, plan, session.processes
        self.skip = self.settings.n_skipped(session.sequences())
        self.engine = Engine.of(session)
        self.fit, self.held_out = (plan.text.subset(half) for half in halves(plan.text.documents))
        heads = {head_name(*place): ablation for place, ablation in plan.heads.items()}
        self.conditions = plan.conditions | heads
        self.scored = [
            (name, probe)
            for name, ablation in self.conditions.items()
            for probe in plan.probes
            if ablation.heads is None or probe in HEAD_PROBES
        ]
        self.writing = [one for one in self.conditions.values() if one.condition.writers]
        lengths = {name: probe.tokens.shape[1] for name, probe in plan.probes.items()}
        other_lengths = [name for name, length in lengths.items() if length != lengths["text"]]
        self.other_lengths = other_lengths if self.writing else []
        self.decoded: dict[str, list[str]] = {}
        if "position" in plan.measures:
            only_sources = [
                name for name, of in plan.conditions.items() if of.condition.are_sources
            ]
            self.decoded = {"distances": list(plan.conditions), "untrained": only_sources}
        self.without_sources = Ablation(remove=plan.sources.ordered)
        shown = () if "heads" in plan.skipped else plan.heads
        self.layers = list(dict.fromkeys(layer for layer, _ in shown))

    def sizes(self) -> dict[str, int]:
        """Return how many sequences this process runs in each stream, by the stream's key."""
        return {
            part: self.processes.n_own(len(probe.tokens), self.seqs_per_batch(probe))
            for key, probe, ablation in self.streams()
            for part in (*position_keys(key, ablation).values(), key)
        }

    def streams(self) -> Iterator[tuple[str, Probe, Ablation]]:
        """Yield the key of each stream, its sequences and its removals."""
        text, intact = self.plan.text, Ablation()
        if any(condition.needs_calibration for condition in self.conditions.values()):
            yield "calibration", text, intact
        for name in self.other_lengths:
            yield f"positions/{name}", self.plan.probes[name], intact
        for name, probe in self.scored:
            yield f"loss/{name}/{probe}", self.plan.probes[probe], self.conditions[name]
        for layer in self.layers:
            yield f"head/L{layer}/intact", text, intact
            yield f"head/L{layer}/content", text, self.without_sources
        for weights, names in self.decoded.items():
            for name in names:
                yield f"{weights}/{name}/fit", self.fit, self.conditions[name]
                yield f"{weights}/{name}/distance", self.held_out, self.conditions[name]

    def seqs_per_batch(self, probe: Probe) -> int:
        """Return how many sequences make about as many tokens as a batch of text windows.

        Every process that shares the run gets a batch.
        """
        n_seqs, length = probe.tokens.shape
        same_tokens = self.settings.seqs_per_batch * self.settings.seq_len // length
        return max(1, min(same_tokens, n_seqs // self.processes.count))

    def on(self, probe: Probe) -> Engine:
        """Return the engine on the sequences of a probe."""
        return replace(
            self.engine,
            inputs=probe.tokens,
            documents=probe.documents,
            batch_size=self.seqs_per_batch(probe),
        )

    def run(self) -> MeasuredBehaviour:
        """Return the losses and decodability of all conditions, and the heads' patterns."""
        text = self.on(self.plan.text)
        self.engine = text.calibrated("calibration", self.conditions.values())
        return MeasuredBehaviour(
            losses={place: self.losses(*place) for place in self.scored},
            head_patterns={layer: self.head_patterns(layer) for layer in self.layers},
            **{weights: self.decode(weights) for weights in self.decoded},
        )

    def losses(self, name: str, probe_name: str) -> Losses:
        """Return the losses of a condition, means over the sequences of each document."""
        ablation, probe = self.conditions[name], self.plan.probes[probe_name]
        if "mask" in ablation.condition:
            ablation = replace(ablation, prefix=probe.prefix)
        engine = self.on(probe)
        if ablation.condition.writers and probe_name in self.other_lengths:
            engine = self.with_positions(engine, probe_name)
        losses = engine.losses(f"loss/{name}/{probe_name}", ablation)
        return by_document(losses, probe.documents)

    def with_positions(self, engine: Engine, probe_name: str) -> Engine:
        """Return the engine with writers' positions in windows of a probe's own length."""
        own = engine.calibrated(f"positions/{probe_name}", self.writing).calibration
        assert own is not None
        assert engine.calibration is not None
        return replace(engine, calibration=replace(engine.calibration, positions=own.positions))

    def head_patterns(self, layer: int) -> list[Interval]:
        """Return the RMS of p of each head of a layer, whose maps are held one layer at a time."""
        text = self.on(self.plan.text)
        both = [
            text.scores(f"head/L{layer}/{name}", ablation, layers=[layer], per_head=True)
            for name, ablation in (("intact", Ablation()), ("content", self.without_sources))
        ]
        heads = zip(*(maps.by_layer[layer].heads for maps in both), strict=True)
        grams = (ContrastGram.of(dict(enumerate(shared_patterns(both)))) for both in heads)
        return [gram.size({0: 1.0, 1: -1.0}) for gram in grams]

    def decode(self, weights: str) -> dict[str, Distances]:
        """Return the distances of every condition, of the trained or of random weights."""
        model, seed = self.engine.model, self.settings.seed
        with untrained(model, seed) if weights == "untrained" else nullcontext():
            return {
                name: self.distances(f"{weights}/{name}", name) for name in self.decoded[weights]
            }

    def distances(self, key: str, name: str) -> Distances:
        """Return the distances of true and fitted index in the documents held out of the fit."""
        fit, held_out, ablation = self.on(self.fit), self.on(self.held_out), self.conditions[name]
        generator = torch.Generator().manual_seed(self.settings.seed)
        n_seqs, seq_len = fit.inputs.shape
        targets = index_targets(n_seqs, seq_len, self.skip, generator)

        def regress(stream: StreamCheckpoint | None) -> State:
            xx, xy = capture_moments(
                fit.model,
                fit.inputs,
                targets,
                n_layers=len(self.plan.layers),
                skip=self.skip,
                batch_size=fit.batch_size,
                checkpoint=stream,
            )
            return {"weights": ridge(xx, xy)}

        def read(stream: StreamCheckpoint | None) -> State:
            distances = capture_distances(
                held_out.model,
                held_out.inputs,
                fits,
                skip=self.skip,
                batch_size=held_out.batch_size,
                checkpoint=stream,
            )
            return {"distances": distances}

        fits = fit.once(f"{key}/fit", regress, ablation)["weights"]
        distances = held_out.once(f"{key}/distance", read, ablation)["distances"]
        return by_document(distances, self.held_out.documents)


@dataclass(frozen=True, kw_only=True, repr=False)
class BehaviourStudy(Run):
    """What a model can no longer do without its mask, position encoding or weights.

    Its `tables` are those of the run's CSV files: `behaviour`, `loss_by_position`, `extrapolation`,
    `decodability`, `heads`.
    """

    kind = "behaviour"

    @property
    def behaviour(self) -> pd.DataFrame:
        """Per measure and condition, its value and its difference to the intact model."""
        return self.tables["behaviour"]


@takes(Settings)
def run_behaviour(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Any,
) -> BehaviourStudy:
    """Measure a model's behaviour as the `behaviour` command does, and return its tables.

    Args:
        model: a name, as the command takes it; what `load` returns; a HookedTransformer or a
            TransformerBridge, with its tokenizer.
        inputs: text, as `capture_losses` takes it; the sequences of one text are one document only
            where `sequences` cut them. By default the sequences that the options describe (`data`,
            `n_seqs`, `seq_len`, ...). Extrapolation needs windows of its own, so it is measured
            without inputs alone.
        out: a folder for the run, as the command writes it; the same call reads it again. By
            default nothing is kept.
        options: the command's flags, as below; a single value or a list may stand for a tuple.

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
    return run_of(BehaviourStudy, run, Settings, model, inputs, out, options)
