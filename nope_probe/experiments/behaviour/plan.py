"""The plan of a run of `behaviour`, and the runs of the model in every condition of the plan.

A plan has the conditions, the sequences and the skipped measures. The runs give the losses of all
sequences, decodability and score maps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from math import log

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.behaviour import by_document, halves, index_targets, ridge
from nope_probe.analyses.jackknife import Interval, rms
from nope_probe.analyses.pattern_changes import positional_part
from nope_probe.components import SOURCES, Component, is_rope
from nope_probe.conditions import Condition
from nope_probe.data.sequences import Sequences, permuted, sequences
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.settings import (
    QUANTITIES,
    Measure,
    Settings,
    make_conditions,
)
from nope_probe.experiments.engine import (
    Engine,
    irreplaceable,
    position_keys,
    validate_first_sequence,
    validate_removable,
)
from nope_probe.hooks.layers.model import numbered_layers, positions_of
from nope_probe.hooks.reading.residuals import capture_distances, capture_moments
from nope_probe.hooks.reading.streaming import ResidualCache, StreamCheckpoint
from nope_probe.hooks.removing.edited_weights import untrained
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.targets import components
from nope_probe.maps.folds import State
from nope_probe.maps.layers import shared_patterns
from nope_probe.maps.maps import ScoreMaps
from nope_probe.runtime.session import Session

MIN_DOCUMENTS = 8  # four to fit on and four held out
FIRST_MEASURES: tuple[Measure, ...] = ("loss", "in-context", "copy")  # on the first page
FIRST_PROBES = ("text", "copy_random")
HEAD_PROBES = ("text", "copy_text")  # on which single heads are removed
Losses = Float[Tensor, "_ _"]  # documents and targets, which differ among probes
Distances = Float[Tensor, "held_out layer fit"]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Sequences of equal length on which the model is run.

    Attributes:
        tokens: the sequences.
        documents: the document of each.
        prefix: how many first positions see each other where the mask is removed: the first target
            that none of them has in sight.
    """

    tokens: Int[Tensor, "seq pos"]
    documents: Int[Tensor, " seq"]
    prefix: int

    def subset(self, which: Int[Tensor, " chosen"]) -> Probe:
        """Return some of the sequences."""
        return replace(self, tokens=self.tokens[which], documents=self.documents[which])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's plan.

    Attributes:
        conditions: the removals by name; the intact model first.
        heads: removals of the W_Q of a single head, by layer and head, if wanted.
        sources: the mask and the position encoding of the model.
        layers: the numbers of the layers in which position and pattern are read.
        measures: the names of the measures.
        probes: the sequences by name.
        skipped: per measure that the model or the data cannot show, the reason.
        bos: whether windows begin with a BOS token.
        trained: the length that the model was trained at, in tokens.
        left_out: weights that are removed only where they are named, and why.
        uniform: the loss of a uniform guess among the tokens that are not special, in nats.
    """

    conditions: dict[str, Ablation]
    heads: dict[tuple[int, int], Ablation]
    sources: Condition
    layers: tuple[int, ...]
    measures: tuple[Measure, ...]
    probes: dict[str, Probe]
    skipped: dict[str, str]
    bos: bool
    trained: int
    left_out: dict[str, str]
    uniform: float

    @property
    def text(self) -> Probe:
        """The text windows."""
        return self.probes["text"]

    @property
    def segment(self) -> int:
        """The length of a segment that fits into a window twice, after BOS."""
        return (self.text.tokens.shape[1] - self.bos) // 2

    @property
    def first(self) -> Plan:
        """The plan of the first page: loss and copies of random tokens, without each source."""
        conditions = {
            name: ablation
            for name, ablation in self.conditions.items()
            if len(ablation.remove) <= 1 and self.removes_sources_alone(name)
        }
        return replace(
            self,
            conditions=conditions,
            heads={},
            measures=tuple(name for name in self.measures if name in FIRST_MEASURES),
            probes={name: self.probes[name] for name in FIRST_PROBES if name in self.probes},
            skipped={},
        )

    def measured(self, measure: Measure) -> bool:
        """Return whether a measure is asked for and can be shown."""
        return measure in self.measures and measure not in self.skipped

    def removes_mask(self, name: str) -> bool:
        """Return whether a condition removes the mask, so that prefixes are bidirectional."""
        return "mask" in self.conditions[name].remove

    def without_sources(self, ablation: Ablation) -> Ablation:
        """Return an ablation that removes the model's sources too."""
        removed = Condition.of({*ablation.remove, *self.sources})
        return replace(ablation, remove=removed.ordered)

    def removes_sources_alone(self, name: str) -> bool:
        """Return whether a condition removes nothing but sources, or bands of RoPE."""
        removed = self.conditions[name].remove
        return all(component in self.sources or is_rope(component) for component in removed)


def make_plan(session: Session[Settings]) -> Plan:
    """Return the measures and sequences of a run.

    Raises:
        UserError: for a condition that the model does not have, too few documents, or measures none
            of which the model or the data can show.
    """
    settings, model, text = session.settings, session.loaded.model, session.sequences()
    tokenizer = session.loaded.tokenizer
    if tokenizer is None or text.kind in ("random", "vectors"):
        raise UserError("behaviour is measured on text, with a language model and its tokenizer")
    has, left_out = components(model), irreplaceable(model)
    conditions = make_conditions(has, settings.removals, settings.substitutes, left_out)
    settings.validate_removals(conditions)
    removed = {name for condition in conditions.values() for name in condition.remove}
    validate_removable(model, removed | ({"w_q"} if settings.heads else set()))
    layers = settings.layers_of(session.loaded.info)  # refused before anything is run
    if text.n_documents < MIN_DOCUMENTS:
        raise UserError(
            f"{len(text)} sequences from {text.n_documents} documents: {MIN_DOCUMENTS} documents "
            "are needed; raise --n-seqs, or take other --data"
        )
    probes, skipped = make_probes(session, has)
    if not {*settings.measures} - {*skipped}:
        reasons = "; ".join(f"{name}: {skipped[name]}" for name in settings.measures)
        raise UserError(f"nothing to measure ({reasons})")
    w_q = settings.substitutes[0].without(["w_q"])
    return Plan(
        conditions=conditions,
        heads={
            (block.index, head): replace(w_q, heads={block.index: [head]})
            for block in numbered_layers(model, layers)
            for head in range(block.n_heads if settings.heads else 0)
        },
        sources=Condition(name for name in SOURCES if name in has),
        layers=layers,
        measures=settings.measures,
        probes=probes,
        skipped=skipped,
        bos=text.bos,
        trained=settings.trained_len_of(session.loaded.info.n_ctx),
        left_out=left_out if "weights" in settings.removals else {},
        uniform=log(len(tokenizer) - len(set(tokenizer.all_special_ids))),
    )


def make_probes(
    session: Session[Settings], has: Sequence[Component]
) -> tuple[dict[str, Probe], dict[str, str]]:
    """Return the sequences that the measures need, and which measures are skipped and why.

    Args:
        session: the run.
        has: the components that the model has.
    """
    settings, data = session.settings, session.sequences()
    skipped: dict[str, str] = {}
    start, prefix = int(data.bos), settings.prefix_len
    segment = (settings.seq_len - start) // 2
    random = sequences(
        "random",
        tokenizer=session.loaded.tokenizer,
        n_seqs=settings.n_seqs,
        seq_len=segment,
        seed=settings.seed,
        bos="never",
    )
    random_tokens = torch.cat([data.inputs[:, :start], random.inputs], 1)
    text, of_random = probe_of(data, prefix), probe_of(random, start + segment)
    generator = torch.Generator().manual_seed(settings.seed)
    twice = repeated(text.tokens, segment, start)
    probes = {
        "text": text,
        "copy_text": replace(text, tokens=twice, prefix=start + segment),
        "order": replace(text, tokens=permuted(text.tokens, generator, start, prefix)),
        "copy_random": replace(of_random, tokens=repeated(random_tokens, segment, start)),
    }
    if data.bos:
        other_first = torch.cat([random.inputs[:, -1:], text.tokens[:, 1:]], 1)
        probes["without_bos"] = replace(text, tokens=text.tokens[:, 1:], prefix=prefix - 1)
        probes["other_first"] = replace(text, tokens=other_first)
    else:
        skipped["bos"] = "sequences begin without a BOS token"
    if "extrapolation" in settings.measures:
        try:
            probes["long"] = long_windows(session, has)
        except UserError as error:
            skipped["extrapolation"] = str(error)
    if "pattern" in settings.measures:
        layers = settings.layers_of(session.loaded.info)
        try:
            validate_first_sequence(session.loaded.model, data.inputs, layers)
        except UserError as error:
            skipped["pattern"] = str(error)
    taken = [about for about in QUANTITIES.values() if about.measure in settings.measures]
    wanted = {"text", *(about.probe for about in taken)}
    return {name: probe for name, probe in probes.items() if name in wanted}, skipped


def probe_of(data: Sequences, prefix: int) -> Probe:
    """Return sequences with their documents; a sequence drawn by itself is its own document."""
    documents = torch.arange(len(data)) if data.documents is None else data.documents
    return Probe(tokens=data.inputs, documents=documents, prefix=prefix)


def repeated(
    tokens: Int[Tensor, "seq pos"], length: int, start: int
) -> Int[Tensor, "seq start_and_twice"]:
    """Return each sequence's first tokens twice, after its BOS if it has one.

    Args:
        tokens: the sequences.
        length: of the segment that is repeated.
        start: how many BOS tokens they begin with.

    Example:
        >>> repeated(torch.tensor([[0, 5, 6, 7, 8]]), 2, start=1)
        tensor([[0, 5, 6, 5, 6]])
    """
    segment = tokens[:, start : start + length]
    return torch.cat([tokens[:, :start], segment, segment], 1)


def long_windows(session: Session[Settings], has: Sequence[Component]) -> Probe:
    """Return windows beyond the trained context.

    Raises:
        UserError: saying why there are none.
    """
    settings, n_ctx = session.settings, session.loaded.info.n_ctx
    trained, length = settings.trained_len_of(n_ctx), settings.extrapolated_len(n_ctx)
    if "pos_embed" in has:
        raise UserError("positions are learned: there are none beyond the context")
    if length <= trained:
        raise UserError(
            f"the trained context of {trained} tokens is not shorter than --max-len "
            f"{settings.max_len}"
        )
    if session.call.inputs is not None:
        raise UserError(f"it takes windows of {length} tokens, and other sequences are given")
    n_positions = positions_of(session.loaded.model)
    if n_positions is not None and length > n_positions:
        raise UserError(
            f"the model has {n_positions} positions: load it with n_ctx={length}, or lower "
            "--max-len"
        )
    if settings.prefix_len > trained - trained // 4:
        raise UserError(
            f"the prefix of {settings.prefix_len} tokens reaches into the last quarter of the "
            f"trained context of {trained}"
        )
    try:
        long = session.sequences("long", settings=settings.long_windows(n_ctx))
    except UserError as error:
        raise UserError(f"no windows of {length} tokens: {error}") from error
    return probe_of(long, settings.prefix_len)


@dataclass(frozen=True, kw_only=True)
class MeasuredBehaviour:
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
    return f"score/{Condition(ablation.remove).name}{weights}"


def head_name(layer: int, head: int) -> str:
    """Return the name of a head, such as `L2H3`."""
    return f"L{layer}H{head}"


def capture(
    session: Session[Settings], plan: Plan, show_first: Callable[[MeasuredBehaviour], None]
) -> MeasuredBehaviour:
    """Return all measurements, from the checkpoint or captured and saved.

    Args:
        session: the run.
        plan: its plan.
        show_first: called with the measurements of `plan.first`, before all others are made.
    """
    runner = _Runner(session, plan)
    sizes = runner.sizes()
    session.announce(len(plan.conditions) + len(plan.heads), [*sizes])
    with session.checkpoint.progress(sizes):
        return runner.run(show_first)


class _Runner:
    """The conditions of a plan, each with the captures that its measures need."""

    def __init__(self, session: Session[Settings], plan: Plan) -> None:
        self.settings, self.plan, self.processes = session.settings, plan, session.processes
        self.skip = self.settings.n_skipped(session.sequences())
        self.engine = Engine.of(session)
        self.fit, self.held_out = (plan.text.subset(half) for half in halves(plan.text.documents))
        heads = {head_name(*place): ablation for place, ablation in plan.heads.items()}
        self.conditions = plan.conditions | heads
        first = plan.first
        self.first: list[tuple[str, str]] = []
        if first.measures and len(first.conditions) > 1:
            self.first = list(product(first.conditions, first.probes))
        self.scored = [
            (name, probe)
            for name, ablation in self.conditions.items()
            for probe in plan.probes
            if (ablation.heads is None or probe in HEAD_PROBES) and (name, probe) not in self.first
        ]
        self.writing = [condition for condition in self.conditions.values() if condition.writers]
        shared = plan.probes if self.writing else HEAD_PROBES if plan.heads else ()
        self.residuals = {probe: ResidualCache() for probe in shared}
        lengths = {name: probe.tokens.shape[1] for name, probe in plan.probes.items()}
        other_lengths = [name for name, length in lengths.items() if length != lengths["text"]]
        self.other_lengths = other_lengths if self.writing else []
        self.decoded: dict[str, list[str]] = {}
        if plan.measured("position"):
            only_sources = [name for name in plan.conditions if plan.removes_sources_alone(name)]
            self.decoded = {"distances": list(plan.conditions), "untrained": only_sources}
        self.maps: dict[str, Ablation] = {}
        self.n_heads: dict[int, int] = {}
        if plan.measured("pattern"):
            removed = list(plan.conditions.values())
            removed += [plan.without_sources(condition) for condition in removed]
            self.maps = {map_key(ablation): ablation for ablation in removed}
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
        for name, probe in self.first:
            yield f"loss/{name}/{probe}", self.plan.probes[probe], self.conditions[name]
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

    def run(self, show_first: Callable[[MeasuredBehaviour], None]) -> MeasuredBehaviour:
        """Return the losses, decodability and score maps of all conditions."""
        text = self.on(self.plan.text)
        losses = {(name, probe): self.losses(name, probe) for name, probe in self.first}
        if 0 < len(self.first) < len(self.sizes()):
            show_first(MeasuredBehaviour(losses=losses))
        text = text.calibrated("calibration", self.conditions.values())
        self.engine = text
        return MeasuredBehaviour(
            losses=losses | {place: self.losses(*place) for place in self.scored},
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
        engine = replace(engine, residuals=self.residuals.get(probe_name))
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
        text, content = self.on(self.plan.text), self.plan.without_sources(Ablation())
        both = [
            text.scores(f"head/L{layer}/{name}", ablation, layers=[layer], per_head=True)
            for name, ablation in (("intact", Ablation()), ("content", content))
        ]
        heads = zip(*(maps.by_layer[layer].heads for maps in both), strict=True)
        parts = [positional_part(*shared_patterns(both)) for both in heads]
        return [rms(part.product(part)) for part in parts]

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
