"""Runs of a model in every condition: losses of all probes, decodability, score maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.behaviour import by_document, halves, index_targets, ridge
from nope_probe.analyses.jackknife import Interval, cross_products, rms
from nope_probe.analyses.pattern_changes import positional_part
from nope_probe.components import Ablation
from nope_probe.experiments.behaviour.plan import Plan, Probe
from nope_probe.experiments.behaviour.settings import INTACT, Settings
from nope_probe.experiments.engine import Engine, position_keys
from nope_probe.hooks.reading.residuals import capture_distances, capture_moments
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.edited_weights import untrained
from nope_probe.maps.folds import State
from nope_probe.maps.maps import ScoreMaps
from nope_probe.maps.stored_maps import TensorFolds
from nope_probe.runtime.session import Session

HEAD_PROBES = ("text", "copy_text")  # on which single heads are removed
Losses = Float[Tensor, "_ _"]  # documents and targets, which differ among probes
Distances = Float[Tensor, "held_out layer fit"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of every condition.

    Attributes:
        losses: per condition (or single head, such as `L2H3`) and probe, nats.
        distances: per condition, of predicted and true index on held-out documents, in positions;
            the last axis is the fit on true and on shuffled targets.
        untrained: distances of the model with random weights, where only sources are removed.
        maps: score maps by `map_key`: of each condition, and of each without the sources too.
        head_patterns: per layer, the RMS of each head's positional part p in the intact model,
            nats; empty if single heads are not wanted.
    """

    losses: dict[tuple[str, str], Losses]
    distances: dict[str, Distances] = field(default_factory=dict)
    untrained: dict[str, Distances] = field(default_factory=dict)
    maps: dict[str, ScoreMaps] = field(default_factory=dict)
    head_patterns: dict[int, list[Interval]] = field(default_factory=dict)


def map_key(ablation: Ablation) -> str:
    """Return the name of a condition's score maps, the same for equal removals.

    Example:
        >>> map_key(Ablation(remove=["mask", "rope"])), map_key(Ablation(remove=["w_q"]))
        ('score/mask+rope', 'score/w_q:identity')
    """
    weights = f":{ablation.replacement}" if ablation.weights else ""
    return f"score/{'+'.join(ablation.remove) or INTACT}{weights}"


def head_name(layer: int, head: int) -> str:
    """Return the name of a head, such as `L2H3`."""
    return f"L{layer}H{head}"


def capture(session: Session[Settings], plan: Plan) -> Measured:
    """Return all measurements, from the checkpoint or captured and saved."""
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
        self.writing = [condition for condition in self.conditions.values() if condition.writers]
        length = plan.text.tokens.shape[1]
        self.other_lengths = [
            name
            for name, probe in plan.probes.items()
            if self.writing and probe.tokens.shape[1] != length
        ]
        self.decoded: dict[str, list[str]] = {}
        if plan.measured("position"):
            only_sources = [name for name in plan.conditions if plan.removes_sources_alone(name)]
            self.decoded = {"distances": list(plan.conditions), "untrained": only_sources}
        self.maps: dict[str, Ablation] = {}
        self.n_heads: dict[int, int] = {}
        if plan.measured("pattern"):
            without = [plan.without_sources(condition) for condition in plan.conditions.values()]
            self.maps = {
                map_key(ablation): ablation for ablation in (*plan.conditions.values(), *without)
            }
            self.n_heads = Counter(layer for layer, _ in plan.heads)

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
        for key, ablation in self.maps.items():
            yield key, text, ablation
        for layer in self.n_heads:
            yield f"head/L{layer}/intact", text, intact
            yield f"head/L{layer}/content", text, self.plan.without_sources(intact)
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

    def run(self) -> Measured:
        """Return the losses, decodability and score maps of all conditions."""
        text = self.on(self.plan.text)
        text = text.calibrated("calibration", self.conditions.values(), self.skip)
        self.engine = text
        return Measured(
            losses={(name, probe): self.losses(name, probe) for name, probe in self.scored},
            maps={
                key: text.scores(key, ablation, layers=self.plan.layers)
                for key, ablation in self.maps.items()
            },
            head_patterns={layer: self.head_patterns(layer) for layer in self.n_heads},
            **{weights: self.decode(weights) for weights in self.decoded},
        )

    def losses(self, name: str, probe_name: str) -> Losses:
        """Return the losses of a condition, means over the sequences of each document."""
        ablation, probe = self.conditions[name], self.plan.probes[probe_name]
        if "mask" in ablation.remove:
            ablation = replace(ablation, prefix=probe.prefix)
        engine = self.on(probe)
        if ablation.writers and probe_name in self.other_lengths:
            engine = self.with_positions(engine, probe_name)
        losses = engine.losses(f"loss/{name}/{probe_name}", ablation)
        return by_document(losses, probe.documents)

    def with_positions(self, engine: Engine, probe_name: str) -> Engine:
        """Return the engine with writers' positions in windows of a probe's own length."""
        own = engine.calibrated(f"positions/{probe_name}", self.writing, self.skip).calibration
        assert own is not None
        assert engine.calibration is not None
        return replace(engine, calibration=replace(engine.calibration, positions=own.positions))

    def head_patterns(self, layer: int) -> list[Interval]:
        """Return the RMS of p of each head of a layer, whose maps are held one layer at a time."""
        text, intact = self.on(self.plan.text), Ablation()
        whole, content = (
            text.scores(f"head/L{layer}/{name}", ablation, layers=[layer], per_head=True)
            for name, ablation in (
                ("intact", intact),
                ("content", self.plan.without_sources(intact)),
            )
        )
        assert whole.per_head is not None
        assert content.per_head is not None
        counts, patterns = whole.counts, []
        for head in range(self.n_heads[layer]):
            scores, rest = (
                TensorFolds(folds[:, 0, head], whole.query_positions)
                for folds in (whole.per_head, content.per_head)
            )
            part = positional_part(scores, rest, self.skip, counts)[None]
            patterns.append(rms(cross_products(part, part, counts)[:, 0, 0], counts))
        return patterns

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
